"""A request's body, in whichever encoding it came.

Codex sends zstd, others gzip. A few kilobytes can stand for gigabytes, so the limit holds for what
arrives and again for what it stands for, and decompression stops where the limit is passed.
"""

import asyncio
import zlib
from collections.abc import AsyncIterable, Callable
from functools import partial
from typing import Protocol

import zstandard
from starlette.requests import Request

from protocol import errors

_PIECE_BYTES = 1024
"""Compressed bytes that are taken at once. Neither format makes more than 32 MiB of them, so the
limit is overrun by no more than that."""


class _Decompressor(Protocol):
    """What zlib and zstandard have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _zstd() -> _Decompressor:
    # RFC 9659 lets a content encoding have no larger window, which is memory of ours.
    return zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024).decompressobj()


_gzip = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)

_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,  # the same (RFC 9110, 8.4.1.3)
    "deflate": zlib.decompressobj,
    "zstd": _zstd,
}

CONTENT_ENCODINGS = tuple(_DECOMPRESSORS)
"""What a body may come in, besides as it is."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body, decompressed: at most ``limit`` bytes.

    Raises:
        ProtocolError: it is longer, in an encoding we do not know, or not what its encoding says.
        ClientDisconnect: the client left before it was whole.
    """
    encoding = ",".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding in ("", "identity"):
        return await _receive(request.stream(), limit)
    if encoding not in _DECOMPRESSORS:
        raise errors.unsupported_content_encoding(encoding)
    body = await _receive(request.stream(), limit)
    # Both libraries let other threads run while they work.
    return await asyncio.to_thread(_decompress, body, encoding, limit)


async def _receive(stream: AsyncIterable[bytes], limit: int) -> bytes:
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > limit:
            raise errors.payload_too_large(limit)
    return bytes(body)


def _decompress(compressed: bytes, encoding: str, limit: int) -> bytes:
    decompressor = _DECOMPRESSORS[encoding]()
    body = bytearray()
    taken = 0
    while taken < len(compressed) and not decompressor.eof:
        piece = compressed[taken : taken + _PIECE_BYTES]
        taken += len(piece)
        try:
            body += decompressor.decompress(piece)
        except (zlib.error, zstandard.ZstdError) as error:
            raise errors.invalid_body(encoding) from error
        if len(body) > limit:
            raise errors.payload_too_large(limit)
    if not decompressor.eof or decompressor.unused_data or taken < len(compressed):
        raise errors.invalid_body(encoding)  # cut short, or something follows
    return bytes(body)
