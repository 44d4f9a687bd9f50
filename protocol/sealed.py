"""Text in an envelope that only this server opens: ``encrypted_content``.

Reasoning and compacted history travel to the client and back in it. It is opaque, not secret: the
text is compressed and written in base64, and whoever wants to can read it. Clients are the users of
this server, on their own machine, so there is nobody to keep it from. What the envelope does give
is that no client mistakes it for text, and that one from another server is told apart.
"""

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode

PREFIX = "suspend1."
"""Names the maker and the version; what is in another envelope is not read."""

MAX_TEXT_BYTES = 128 * 1024 * 1024
"""A small envelope may hold a text that fills the memory; one of ours holds what was once sent."""


def seal(text: str) -> str:
    """Return ``text`` in an envelope."""
    return PREFIX + urlsafe_b64encode(zlib.compress(text.encode())).decode()


def unseal(envelope: str) -> str:
    """Return the text in ``envelope``.

    Raises:
        ValueError: it is not one of ours, or not whole.
    """
    try:
        if not envelope.startswith(PREFIX):
            raise ValueError
        return _inflated(urlsafe_b64decode(envelope.removeprefix(PREFIX))).decode()
    except (ValueError, zlib.error):
        raise ValueError("expected what this server has sealed") from None


def _inflated(data: bytes) -> bytes:
    inflating = zlib.decompressobj()
    text = inflating.decompress(data, MAX_TEXT_BYTES)
    if not inflating.eof:
        raise ValueError
    return text
