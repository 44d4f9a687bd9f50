"""Bodies come plain or compressed, and never larger than they may be."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from protocol import errors
from protocol.errors import ProtocolError
from server.error_response import error_response
from server.request_body import read_body
from tests.server.sockets import Answer, knock, listening

LIMIT = 10_000
TEXT = b'{"input": "Is it dry in Oslo?"}' * 20


def zstd_stream(data: bytes) -> bytes:
    """Compress without saying how long the whole is, as a client that streams does."""
    compressor = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    stream = compressor.compressobj()
    return stream.compress(data) + stream.flush()


Compress = Callable[[bytes], bytes]
COMPRESSORS: list[tuple[str, Compress]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("zstd", zstandard.compress),
    ("zstd", zstd_stream),
]
in_each_encoding = pytest.mark.parametrize(("encoding", "compress"), COMPRESSORS)


@asynccontextmanager
async def echoing(limit: int = LIMIT) -> AsyncIterator[int]:
    """Serve bodies back as they were read, and give the port."""

    async def echo(request: Request) -> Response:
        return Response(await read_body(request, limit))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProtocolError)
        return error_response(error)

    app = Starlette(
        routes=[Route("/v1/responses", echo, methods=["POST"])],
        exception_handlers={ProtocolError: refuse},
    )
    async with listening(app) as port:
        yield port


async def post(port: int, body: bytes, encoding: str | None) -> Answer:
    headers = {} if encoding is None else {"Content-Encoding": encoding}
    return await knock(port, method="POST", body=body, headers=headers)


def check_refused(answer: Answer, error: ProtocolError) -> None:
    assert answer.status == error.status
    assert answer.json == errors.error_body(error)


@pytest.mark.parametrize("encoding", [None, "", "identity", "IDENTITY"])
@pytest.mark.parametrize("body", [TEXT, b"", b"\x00\xff" * 5000])
async def test_a_plain_body_is_read_as_it_is(encoding: str | None, body: bytes) -> None:
    async with echoing() as port:
        answer = await post(port, body, encoding)

        assert (answer.status, answer.body) == (200, body)


@in_each_encoding
@pytest.mark.parametrize("body", [TEXT, b"", b"a" * LIMIT])
async def test_a_compressed_body_is_decompressed(
    encoding: str, compress: Compress, body: bytes
) -> None:
    async with echoing() as port:
        answer = await post(port, compress(body), encoding)

        assert (answer.status, answer.body) == (200, body)


async def test_the_name_of_an_encoding_may_be_in_capitals_and_spaced() -> None:
    async with echoing() as port:
        answer = await post(port, gzip.compress(TEXT), " GZip ")

        assert (answer.status, answer.body) == (200, TEXT)


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "zstd, identity", "é"])
async def test_an_unknown_encoding_is_refused_with_those_that_are_known(encoding: str) -> None:
    async with echoing() as port:
        answer = await post(port, b"", encoding)

        assert (answer.status, answer.json["error"]["code"]) == (
            415,
            "unsupported_content_encoding",
        )
        assert answer.headers["accept-encoding"] == "gzip, x-gzip, deflate, zstd"


async def test_encodings_in_two_headers_are_two_encodings() -> None:
    async with echoing() as port:
        headers = {"Content-Encoding": "identity", "content-encoding": "gzip"}
        answer = await knock(port, method="POST", headers=headers)

        assert answer.status == 415


# --- The limit -----------------------------------------------------------------------------------


async def test_a_plain_body_over_the_limit_is_refused() -> None:
    async with echoing() as port:
        assert (await post(port, b"a" * LIMIT, None)).status == 200
        check_refused(await post(port, b"a" * (LIMIT + 1), None), errors.payload_too_large(LIMIT))


@in_each_encoding
async def test_a_body_over_the_limit_when_decompressed_is_refused(
    encoding: str, compress: Compress
) -> None:
    async with echoing() as port:
        answer = await post(port, compress(b"a" * (LIMIT + 1)), encoding)

        check_refused(answer, errors.payload_too_large(LIMIT))


@in_each_encoding
async def test_a_body_over_the_limit_while_compressed_is_not_decompressed(
    encoding: str, compress: Compress
) -> None:
    body = bytes(range(1, 250)) * 2
    limit = len(compress(body)) - 1
    async with echoing(limit) as port:
        check_refused(
            await post(port, b"\0" * (limit + 1), encoding), errors.payload_too_large(limit)
        )


@in_each_encoding
async def test_decompression_stops_at_the_limit(encoding: str, compress: Compress) -> None:
    """What follows is not looked at: it would be refused for another reason."""
    bomb = compress(b"\0" * 40_000_000)[:-8] + b"damaged!"
    async with echoing() as port:
        answer = await post(port, bomb, encoding)

        check_refused(answer, errors.payload_too_large(LIMIT))


async def test_a_zstd_body_may_not_ask_for_more_memory_than_an_encoding_may() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    async with echoing() as port:
        answer = await post(port, stream.compress(TEXT) + stream.flush(), "zstd")

        check_refused(answer, errors.invalid_body("zstd"))


# --- Damage --------------------------------------------------------------------------------------


@in_each_encoding
async def test_a_body_that_is_not_what_its_encoding_says_is_refused(
    encoding: str, compress: Compress
) -> None:
    whole = compress(TEXT)
    damaged = b"\xff" + whole[1:]
    async with echoing() as port:
        for body in (b"", TEXT, damaged, whole[:1], whole[:-1], whole + b"\0", whole + whole):
            check_refused(await post(port, body, encoding), errors.invalid_body(encoding))


# --- Others go on --------------------------------------------------------------------------------


async def test_the_event_loop_turns_while_a_body_is_decompressed() -> None:
    body = gzip.compress(b"\0" * 20_000_000)
    turns = count()

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def turn() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    request = Request({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receive)
    async with asyncio.TaskGroup() as tasks:
        others = tasks.create_task(turn())
        read = await read_body(request, limit=30_000_000)
        others.cancel()

    assert len(read) == 20_000_000
    assert next(turns) > 10
