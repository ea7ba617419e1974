"""Certificates for tests: an authority, and what it issues, as PEM in files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


class Authority:
    """A certificate authority whose files are in ``directory``; ``ca`` is the path of its own."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        self._certificate = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        self.directory = directory
        self.ca = str(directory / f"{name}.pem")
        self.ca_pem = self._ca.cert_pem.bytes().decode()
        Path(self.ca).write_text(self.ca_pem)

    def own(self, name: str) -> str:
        """The path of a key store with the authority's own certificate, which signed itself."""
        path = self.directory / f"{name}-own.pem"
        path.write_bytes(self._ca.private_key_pem.bytes() + self._ca.cert_pem.bytes())
        return str(path)

    def issue(
        self,
        name: str,
        *hosts: str,
        subject: x509.Name | None = None,
        not_before: timedelta = -DAY,
        not_after: timedelta = 30 * DAY,
        password: str = "",
        usage: tuple[x509.ObjectIdentifier, ...] = (
            ExtendedKeyUsageOID.CLIENT_AUTH,
            ExtendedKeyUsageOID.SERVER_AUTH,
        ),
    ) -> str:
        """The path of a key store for ``hosts``, subject ``CN=name`` unless given. The times count
        from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject or x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + not_before)
            .not_valid_after(now + not_after)
        )
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        if hosts:
            names = [_general_name(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())  # type: ignore[arg-type]
        encryption = (
            serialization.BestAvailableEncryption(password.encode())
            if password
            else serialization.NoEncryption()
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        path = self.directory / f"{name}.pem"
        path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)


def _general_name(host: str) -> x509.GeneralName:
    import ipaddress

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
