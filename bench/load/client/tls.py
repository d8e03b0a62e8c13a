"""TLS as probe and client processes use it: whom to trust, and what to say when it does not come about."""

from __future__ import annotations

import ssl

TRUST_HINT = "; to trust its authority, name a file with its certificate in SSL_CERT_FILE"
PLAIN_HINT = "; if the server speaks plain HTTP, write http:// instead of https://"


def tls_context(verify: bool) -> ssl.SSLContext:
    """`verify` False: any certificate will do."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def tls_reason(error: ssl.SSLError) -> str:
    """Why there is no TLS connection. A bad certificate is one of TLS; the rest may be no TLS at all."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}{TRUST_HINT}"
    return f"{getattr(error, 'reason', None) or error}{PLAIN_HINT}"
