"""Certificates of a cluster on this machine: a certificate authority of its own, and what it signs.

They are made by ``trustme`` (the extra ``secure``), are ECDSA, and are good for this machine's
names: ``localhost``, ``127.0.0.1`` and ``::1``. Whoever reads the directory can pose as anybody.
"""

from __future__ import annotations

import os
from typing import Any, Final

from kept.storage.errors import ConfigurationError

NAMES: Final = ("localhost", "127.0.0.1", "::1")
CA_FILE: Final = "ca.pem"
_CA_KEY_FILE: Final = "ca-key.pem"
ORGANIZATION: Final = "kept"
MAPPING_RULES: Final = "RULE:^CN=([^,]+),.*$/$1/,DEFAULT"
"""``ssl.principal.mapping.rules`` under which a certificate's principal is the name that it was
issued for.
"""


class LocalCertificates:
    """A directory with ``ca.pem`` and a PEM file of key and certificate for each name; what is
    there already is used again. Raises ConfigurationError without ``trustme``.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.ca_path = os.path.join(directory, CA_FILE)
        self._ca: Any = None

    def path(self, name: str) -> str:
        """The file with the key and the certificate of ``name``, which is its common name."""
        path = os.path.join(self.directory, f"{name}.pem")
        if not os.path.exists(path):
            issued = self._authority().issue_cert(
                *NAMES,
                common_name=name,
                organization_name=ORGANIZATION,
                organization_unit_name=ORGANIZATION,
            )
            chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
            _write(path, _pkcs8(issued.private_key_pem.bytes()) + chain)
        return path

    def _authority(self) -> Any:
        """Make it, or take up the one that is there."""
        if self._ca is None:
            trustme = _trustme()
            key_path = os.path.join(self.directory, _CA_KEY_FILE)
            if os.path.exists(key_path):
                self._ca = trustme.CA.from_pem(_read(self.ca_path), _read(key_path))
            else:
                self._ca = trustme.CA(
                    organization_name=ORGANIZATION, organization_unit_name=ORGANIZATION
                )
                os.makedirs(self.directory, mode=0o700, exist_ok=True)
                _write(self.ca_path, self._ca.cert_pem.bytes())
                _write(key_path, self._ca.private_key_pem.bytes())
        return self._ca


def _trustme() -> Any:
    try:
        import trustme
    except ImportError:
        raise ConfigurationError(
            "certificates of this machine's own need trustme: pip install 'kept-log[secure]'"
        ) from None
    return trustme


def _pkcs8(pem: bytes) -> bytes:
    """A key in the one form that Java reads, too."""
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(pem, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _read(path: str) -> bytes:
    with open(path, "rb") as source:
        return source.read()


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as target:
        target.write(data)
