"""What a server answers that is asked for its models tells whether the address is right."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from scripts.conformance.address import address_of
from scripts.conformance.listing import Listing, UnreachableError, listing_of
from tests.scripts.conform_server import talking
from tests.server.sockets import DEADLINE_SECONDS, listening


async def listing(answer: Response) -> Listing:
    async def models(request: Request) -> Response:
        return answer

    async with listening(Starlette(routes=[Route("/v1/models", models)])) as port:
        return await listing_of(address_of(f"http://127.0.0.1:{port}"), DEADLINE_SECONDS)


def raw(said: bytes) -> AbstractAsyncContextManager[str]:
    """Answer a connection with ``said`` and end it; where it is empty, say nothing."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        if not said:
            await reader.read()

    return talking(talk)


async def test_the_first_model_is_found() -> None:
    found = await listing(JSONResponse({"data": [{"id": "one"}, {"id": "two"}]}))

    assert found == Listing("one")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (JSONResponse({"data": []}), '200 OK, with {"data":[]}'),
        (JSONResponse({"data": [{"id": None}]}), '200 OK, with {"data":[{"id":null}]}'),
        (JSONResponse({"detail": "Not Found"}, 404), '404 Not Found, with {"detail":"Not Found"}'),
        (JSONResponse({"error": None}, 401), "401 Unauthorized. The key is missing, wrong"),
        (HTMLResponse("<h1>Hi</h1>"), "with text/html; charset=utf-8 instead of JSON"),
        (
            Response(b"[\xff]", headers={"content-type": "application/json; charset=rot13"}),
            "200 OK, with [\ufffd]",
        ),
        (
            Response(b"{}", headers={"content-type": "application/json; charset=hex"}),
            "200 OK, with {}",
        ),
        (Response(b"[" * 99_999, media_type="application/json"), "200 OK, with [[["),
        (
            Response(b"{}", headers={"content-encoding": "gzip"}),
            "its body cannot be decoded: ",
        ),
        (HTMLResponse("<h1>No</h1>", 404), "404 Not Found, with text/html"),
        (RedirectResponse("https://a.test/v1/models"), "to https://a.test/v1/models"),
        (JSONResponse({"data": 1} | {"x": "y" * 999}), '{"data":1,"x":"yyy'),
    ],
)
async def test_a_note_says_what_came_instead(answer: Response, says: str) -> None:
    found = await listing(answer)

    assert found.first is None
    assert "/v1/models lists no models: " in found.note
    assert says in found.note
    assert len(found.note) < 250


async def test_a_server_that_says_nothing_is_there() -> None:
    async with raw(b"") as host:
        found = await listing_of(address_of(f"http://{host}"), 0.05)

    assert found.first is None
    assert "no answer in 0.05 s" in found.note


async def test_an_answer_that_never_ends_is_not_waited_for() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"1\r\n \r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with talking(drip) as host, asyncio.timeout(DEADLINE_SECONDS):
        found = await listing_of(address_of(f"http://{host}"), 0.05)

    assert found.first is None
    assert "no answer in 0.05 s" in found.note


@pytest.mark.parametrize(
    ("scheme", "said", "says"),
    [
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "does it speak http?"),
        ("http", b"\x15\x03\x01\x00\x02\x02\x46", "does it speak https?"),  # a TLS alert
    ],
)
async def test_the_other_scheme_is_proposed(scheme: str, said: bytes, says: str) -> None:
    async with raw(said) as host:
        with pytest.raises(UnreachableError) as raised:
            await listing_of(address_of(f"{scheme}://{host}"), DEADLINE_SECONDS)

    assert str(raised.value).startswith(f"cannot connect to {scheme}://{host}/v1: ")
    assert str(raised.value).endswith(says)


async def test_nobody_can_be_at_a_name_that_is_none() -> None:
    with pytest.raises(UnreachableError, match=r"http://☃☃\.test/v1: Invalid"):
        await listing_of(address_of("http://☃☃.test"), DEADLINE_SECONDS)


async def test_nobody_is_there() -> None:
    with pytest.raises(UnreachableError, match=r"cannot connect to http://127.0.0.1:1/v1: [^;]*$"):
        await listing_of(address_of("http://127.0.0.1:1"), DEADLINE_SECONDS)
