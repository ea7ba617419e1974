"""Why a TLS handshake failed, in words: what OpenSSL says of certificates, and alerts."""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple

_TRUST: Final = "; who is trusted is in ssl.truststore.location or ssl.truststore.certificates"
_HINTS: Final = {
    18: _TRUST,  # self-signed
    19: _TRUST,  # self-signed in the chain
    20: _TRUST,  # no issuer
    21: _TRUST,  # the first one cannot be verified
    62: "; reach it by a name that its certificate has",
    64: "; reach it by a name that its certificate has",
}
_OWN: Final = "the certificate of this side (ssl.keystore.*)"
_ALERTS: Final = {
    "ACCESS_DENIED": f"the other side denies access to {_OWN}",
    "BAD_CERTIFICATE": f"the other side does not accept {_OWN}",
    "CERTIFICATE_EXPIRED": f"{_OWN} has expired",
    "CERTIFICATE_REQUIRED": f"the other side wants {_OWN}, and there is none",
    "CERTIFICATE_REVOKED": f"{_OWN} is revoked",
    "CERTIFICATE_UNKNOWN": f"the other side does not accept {_OWN}",
    "DECRYPT_ERROR": f"{_OWN} does not fit its key",
    "HANDSHAKE_FAILURE": f"no cipher suite in common, or the other side wants {_OWN}",
    "PROTOCOL_VERSION": "no version of TLS in common (ssl.enabled.protocols)",
    "UNKNOWN_CA": f"the other side does not trust who signed {_OWN}",
    "UNRECOGNIZED_NAME": "the other side does not know the host name that it was called by",
    "UNSUPPORTED_CERTIFICATE": f"the other side cannot use {_OWN}",
}
_WANTED: Final = ("BAD_CERTIFICATE", "HANDSHAKE_FAILURE", "CERTIFICATE_UNKNOWN")
"""What servers also say to who shows none."""
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
_NO_VERSION: Final = ("NO_PROTOCOLS_AVAILABLE", "UNSUPPORTED_PROTOCOL")


class TlsFailure(NamedTuple):
    """What to say, and whether trying again is vain."""

    why: str
    lasting: bool


def tls_failure(error: OSError, *, has_certificate: bool) -> TlsFailure:
    """What an error of a TLS connection means: one of OpenSSL's, or of the socket under it;
    ``has_certificate``: this side shows one when it is asked.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = _HINTS.get(error.verify_code, "")
        return TlsFailure(f"its certificate is not trusted: {error.verify_message}{hint}", True)
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return TlsFailure("it ended the TLS handshake; is its listener SSL or SASL_SSL?", False)
    reason = (error.reason or "").upper()
    _, alert, name = reason.partition("_ALERT_")
    if alert:
        told = name.replace("_", " ").lower()
        if name in _WANTED and not has_certificate:
            name = "CERTIFICATE_REQUIRED"
        meaning = _ALERTS.get(name)
        return TlsFailure(f"TLS alert {told}{f': {meaning}' * bool(meaning)}", bool(meaning))
    if reason in _NOT_TLS:
        return TlsFailure("it does not speak TLS; is its listener SSL or SASL_SSL?", True)
    if reason in _NO_VERSION:
        return TlsFailure(_ALERTS["PROTOCOL_VERSION"], True)
    return TlsFailure(f"TLS failed: {reason.replace('_', ' ').lower() or error}", False)
