"""TLS between the processes of a fleet: each makes the same certificate from the fleet's key.

It is the only certificate that they accept, so both sides of a connection have the key, and no
process between them can read or change a frame.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from functools import cache
from tempfile import NamedTemporaryFile

from headway.errors import ExecutorError

# Constant, so that all processes make the same certificate: it is valid as long as the key.
BEGIN, END = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


async def secure(writer: asyncio.StreamWriter, key: bytes, protocol: int) -> None:
    """Encrypt a connection; ExecutorError unless the peer has the same key."""
    try:
        await writer.start_tls(tls_context(key, protocol))
    except ssl.SSLError as error:
        raise ExecutorError(
            f"it did not prove that it has the key of this fleet ({error.reason}); it belongs to "
            "another fleet, or is not a Headway process of this version"
        ) from None


@cache
def tls_context(key: bytes, protocol: int) -> ssl.SSLContext:
    """The settings of one side: TLS 1.3, and the certificate that both sides must have."""
    from cryptography import x509  # which Unix sockets do not need
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    seed = HKDF(SHA256(), 32, salt=None, info=b"headway fleet certificate").derive(key)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "headway fleet")])
    builder = x509.CertificateBuilder(name, name, private.public_key(), 1, BEGIN, END)
    certificate = builder.sign(private, None).public_bytes(Encoding.PEM)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no connection resumes an earlier one
    with NamedTemporaryFile() as file:  # of mode 0600; ssl reads a private key from files only
        file.write(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.write(certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context
