"""Who is let in, and what the others are told, at both doors."""

import asyncio
import hashlib
import hmac
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from server import access
from server.access import Access, ApiKeyFileError, ApiKeys, add_api_key
from server.settings import Settings
from tests.server.sockets import DEADLINE_SECONDS, Answer, Door, knock, listening

KEY, OTHER_KEY = "sk-alice", "sk-bob"
PAGE = "https://app.example"

at_both_doors = pytest.mark.parametrize("door", Door)


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys() -> ApiKeys:
    return ApiKeys([("alice", sha256(KEY)), ("bob", sha256(OTHER_KEY))])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def key_id(connection: HTTPConnection) -> Any:
    return connection.state.key_id


async def answer_http(request: Request) -> JSONResponse:
    return JSONResponse({"key_id": key_id(request)})


async def answer_socket(websocket: WebSocket) -> None:
    """Say whose key it was, and stay until the client is gone or asks for a failure."""
    await websocket.accept()
    await websocket.send_json({"key_id": key_id(websocket)})
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        assert message.get("text") != "fail"


APP = Starlette(
    routes=[
        Route("/v1/responses", answer_http, methods=["GET", "POST"]),
        WebSocketRoute("/v1/responses", answer_socket),
        Route("/metrics", answer_http),
        Route("/health", answer_http),
    ]
)


@asynccontextmanager
async def guarded(
    api_keys: ApiKeys | None = None, app: ASGIApp = APP, **settings: Any
) -> AsyncIterator[int]:
    """Serve ``app`` behind a guard, and give the port."""
    chosen = Settings(**settings)
    async with listening(Access(app, api_keys, chosen), chosen) as port:
        yield port


def is_let_in(answer: Answer, door: Door) -> bool:
    return answer.status == (200 if door is Door.HTTP else 101)


def check_refused(answer: Answer, status: int, code: str) -> None:
    """Check that a refusal is one that every client understands."""
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == ("rate_limit_error" if status == 429 else "invalid_request_error")
    assert error["message"]


# --- The host ------------------------------------------------------------------------------------


@at_both_doors
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80"],
)
async def test_a_name_that_was_made_to_resolve_to_us_is_refused(door: Door, host: str) -> None:
    async with guarded() as port:
        check_refused(await knock(port, door, host=host), 403, "forbidden_host")


@pytest.mark.parametrize("host", ["", "[::1", "a:b:c", "127.0.0.1:x", "user@127.0.0.1"])
async def test_a_host_that_is_none_is_refused(host: str) -> None:
    async with guarded() as port:
        check_refused(await knock(port, host=host), 403, "forbidden_host")


@at_both_doors
@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1", "[::1]", "[::1]:80"])
async def test_the_names_of_the_loopback_are_answered_to(door: Door, host: str) -> None:
    async with guarded() as port:
        assert is_let_in(await knock(port, door, host=host), door)


async def test_the_bound_host_and_those_allowed_are_answered_to() -> None:
    async with guarded(host="127.0.0.2", allowed_hosts=("box.home", "[fd00::1]")) as port:
        for host in ("127.0.0.2:8000", "box.home", "BOX.home:80", "[fd00::1]:8000"):
            assert is_let_in(await knock(port, host=host), Door.HTTP)
        check_refused(await knock(port, host="127.0.0.3"), 403, "forbidden_host")


async def test_on_other_addresses_every_name_is_answered_to_unless_some_are_given() -> None:
    async with guarded(host="0.0.0.0") as port:
        assert is_let_in(await knock(port, host="any.example"), Door.HTTP)
    async with guarded(host="0.0.0.0", allowed_hosts=("one.example",)) as port:
        assert is_let_in(await knock(port, host="one.example"), Door.HTTP)
        check_refused(await knock(port, host="any.example"), 403, "forbidden_host")


async def test_the_host_is_checked_before_the_key() -> None:
    async with guarded(keys()) as port:
        check_refused(await knock(port, host="evil.example"), 403, "forbidden_host")


# --- The origin ----------------------------------------------------------------------------------


@at_both_doors
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", ""])
async def test_a_web_page_is_refused_if_its_origin_is_not_allowed(door: Door, origin: str) -> None:
    async with guarded(allowed_origins=(PAGE,)) as port:
        answer = await knock(port, door, headers={"Origin": origin})

        check_refused(answer, 403, "forbidden_origin")
        assert "access-control-allow-origin" not in answer.headers


@at_both_doors
@pytest.mark.parametrize(
    "origin", ["http://app.example", "https://app.example:8443", "https://app.example.evil.example"]
)
async def test_an_origin_is_compared_as_a_whole(door: Door, origin: str) -> None:
    async with guarded(allowed_origins=(PAGE,)) as port:
        answer = await knock(port, door, headers={"Origin": origin})

        check_refused(answer, 403, "forbidden_origin")


@at_both_doors
async def test_an_allowed_origin_is_let_in(door: Door) -> None:
    async with guarded(allowed_origins=(PAGE,)) as port:
        assert is_let_in(await knock(port, door, headers={"Origin": PAGE}), door)


OWN = [
    ("http://127.0.0.1:8000", "127.0.0.1:8000"),
    ("https://localhost", "LocalHost"),
    ("ws://LOCALHOST:80", "localhost:80"),
    ("http://[::1]:8000", "[::1]:8000"),
]


@at_both_doors
@pytest.mark.parametrize(("origin", "host"), OWN)
async def test_the_origin_that_the_request_goes_to_is_let_in(
    door: Door, origin: str, host: str
) -> None:
    async with guarded() as port:
        answer = await knock(port, door, host=host, headers={"Origin": origin})

        assert is_let_in(answer, door)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8001", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1"),
        ("http://127.0.0.1", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://evil.example/127.0.0.1", "127.0.0.1"),
        ("http://user@127.0.0.1", "127.0.0.1"),
    ],
)
async def test_an_origin_that_the_request_does_not_go_to_is_refused(origin: str, host: str) -> None:
    async with guarded() as port:
        answer = await knock(port, host=host, headers={"Origin": origin})

        check_refused(answer, 403, "forbidden_origin")


async def test_an_own_origin_means_nothing_where_every_name_is_answered_to() -> None:
    own = {"Origin": "http://box.home:8000"}
    async with guarded(host="0.0.0.0") as port:
        answer = await knock(port, host="box.home:8000", headers=own)
        check_refused(answer, 403, "forbidden_origin")
    async with guarded(host="0.0.0.0", allowed_hosts=("box.home",)) as port:
        assert is_let_in(await knock(port, host="box.home:8000", headers=own), Door.HTTP)


@at_both_doors
async def test_a_star_allows_every_origin_but_null(door: Door) -> None:
    async with guarded(allowed_origins=("*",)) as port:
        assert is_let_in(await knock(port, door, headers={"Origin": PAGE}), door)
        answer = await knock(port, door, headers={"Origin": "null"})
        check_refused(answer, 403, "forbidden_origin")


@at_both_doors
async def test_null_is_allowed_by_its_name(door: Door) -> None:
    async with guarded(allowed_origins=("null",)) as port:
        assert is_let_in(await knock(port, door, headers={"Origin": "null"}), door)


async def test_a_page_may_read_the_answer_and_the_refusal() -> None:
    async with guarded(keys(), allowed_origins=(PAGE,)) as port:
        for authorization, status in ((bearer(KEY), 200), ({}, 401)):
            answer = await knock(port, headers={"Origin": PAGE} | authorization)

            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "access-control-allow-credentials" not in answer.headers


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    "Access-Control-Request-Private-Network": "true",
}


async def test_a_preflight_needs_no_key_and_allows_what_clients_send() -> None:
    async with guarded(keys(), allowed_origins=(PAGE,)) as port:
        answer = await knock(port, method="OPTIONS", headers={"Origin": PAGE} | PREFLIGHT)

        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        allowed = answer.headers["access-control-allow-headers"]
        assert allowed == PREFLIGHT["Access-Control-Request-Headers"]
        assert answer.headers["access-control-allow-private-network"] == "true"


async def test_a_preflight_of_another_origin_is_refused() -> None:
    async with guarded(allowed_origins=(PAGE,)) as port:
        headers = {"Origin": "https://evil.example"} | PREFLIGHT
        answer = await knock(port, method="OPTIONS", headers=headers)

        check_refused(answer, 403, "forbidden_origin")
        assert "access-control-allow-origin" not in answer.headers


# --- The key -------------------------------------------------------------------------------------


@at_both_doors
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk-mallory",
        "Bearer sk-alic",
        "Bearer sk-alice sk-bob",
        "Basic sk-alice",
        "sk-alice",
        "Bearer \xe9",
    ],
)
async def test_without_a_known_key_nobody_is_let_in(door: Door, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with guarded(keys()) as port:
        answer = await knock(port, door, headers=headers)

        check_refused(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert b"sk-" not in answer.body


@at_both_doors
async def test_the_hash_of_a_key_is_no_key(door: Door) -> None:
    async with guarded(keys()) as port:
        check_refused(await knock(port, door, headers=bearer(sha256(KEY))), 401, "invalid_api_key")


@at_both_doors
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_known_key_is_let_in(door: Door, scheme: str) -> None:
    async with guarded(keys()) as port:
        answer = await knock(port, door, headers={"Authorization": f"{scheme} {OTHER_KEY}"})

        assert is_let_in(answer, door)


async def test_the_application_learns_whose_key_it_is() -> None:
    async with guarded(keys()) as port:
        assert (await knock(port, headers=bearer(OTHER_KEY))).json == {"key_id": "bob"}
        async with opened(port, OTHER_KEY) as socket:
            assert await socket.recv() == '{"key_id":"bob"}'


async def test_without_keys_everyone_is_let_in_and_nobody_has_a_name() -> None:
    async with guarded() as port:
        assert (await knock(port)).json == {"key_id": None}
        assert (await knock(port, headers=bearer("x"))).json == {"key_id": None}


async def test_only_the_health_is_told_to_all() -> None:
    async with guarded(keys()) as port:
        assert (await knock(port, path="/health")).status == 200
        for path in ("/metrics", "/v1/models", "/health/../metrics", "/nowhere", "/"):
            check_refused(await knock(port, path=path), 401, "invalid_api_key")


async def test_a_refused_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with guarded(keys()) as port:
        for door in Door:
            await knock(port, door, headers=bearer("sk-mallory"))

    assert "sk-mallory" not in caplog.text


@pytest.mark.parametrize("key", [KEY, OTHER_KEY, "sk-mallory"])
def test_a_key_is_compared_with_all_known_in_constant_time(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, str]] = []

    def compare(known: str, given: str) -> bool:
        compared.append((known, given))
        return hmac.compare_digest(known, given)

    class Recording:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(access, "hmac", Recording)
    keys().authenticate(f"Bearer {key}")

    assert compared == [(sha256(KEY), sha256(key)), (sha256(OTHER_KEY), sha256(key))]


# --- The file of keys ----------------------------------------------------------------------------


def test_a_new_key_is_known_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    alice, bob = add_api_key(path, "alice"), add_api_key(path, "bob")

    known = ApiKeys.from_file(path)
    assert known.authenticate(f"Bearer {alice}") == "alice"
    assert known.authenticate(f"Bearer {bob}") == "bob"
    assert alice.startswith("sk-")
    assert len(alice) > 40


def test_the_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    key = add_api_key(path, "alice")

    assert path.read_text() == f"alice {sha256(key)}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_added_after_what_was_there_also_where_the_line_did_not_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# Ours.\n\nalice {sha256(KEY)}")

    key = add_api_key(path, "bob")

    assert path.read_text() == f"# Ours.\n\nalice {sha256(KEY)}\nbob {sha256(key)}\n"


def test_a_name_may_have_two_keys_while_one_replaces_the_other(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    old, new = add_api_key(path, "alice"), add_api_key(path, "alice")

    known = ApiKeys.from_file(path)
    assert known.authenticate(f"Bearer {old}") == known.authenticate(f"Bearer {new}") == "alice"


def test_comments_spaces_and_capitals_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"\n  # Ours.\n\n  alice \t {sha256(KEY).upper()}  \n")

    assert ApiKeys.from_file(path).authenticate(f"Bearer {KEY}") == "alice"


@pytest.mark.parametrize(
    "line",
    [
        "sk-mallory-in-clear",
        "alice sk-mallory-in-clear",
        f"alice {'0' * 63}",
        f"alice {'g' * 64}",
        f"alice {'0' * 64} more",
        f"al/ice {'0' * 64}",
        "0" * 64,
    ],
)
def test_a_bad_line_is_told_by_its_number_and_not_quoted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# Ours.\nbob {sha256(OTHER_KEY)}\n\n{line}\n")

    with pytest.raises(ApiKeyFileError) as caught:
        ApiKeys.from_file(path)

    assert str(caught.value).startswith(f"{path}, line 4: expected ")
    assert line not in str(caught.value)
    assert "mallory" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# Nobody.\n"])
def test_a_file_without_a_key_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)

    with pytest.raises(ApiKeyFileError, match="holds no API key"):
        ApiKeys.from_file(path)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")

    for path, reason in (
        (tmp_path / "nowhere", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "not a text file"),
    ):
        with pytest.raises(ApiKeyFileError, match=reason) as caught:
            ApiKeys.from_file(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "#a", "a" * 65, "é"])
def test_a_key_for_no_name_is_not_made(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys"

    with pytest.raises(ApiKeyFileError, match="expected a name"):
        add_api_key(path, name)

    assert not path.exists()


def test_a_key_that_cannot_be_kept_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ApiKeyFileError, match="Is a directory"):
        add_api_key(tmp_path, "alice")


# --- The number of connections -------------------------------------------------------------------


@asynccontextmanager
async def opened(port: int, key: str = KEY) -> AsyncIterator[ClientConnection]:
    """Open a WebSocket and give it up without a word, as Codex does."""
    url = f"ws://127.0.0.1:{port}/v1/responses"
    socket = await connect(url, additional_headers=bearer(key))
    try:
        yield socket
    finally:
        socket.transport.abort()


async def until_let_in(port: int, key: str) -> None:
    """Knock until the server has noticed that somebody is gone."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await knock(port, Door.UPGRADE, headers=bearer(key))).status != 101:
            pass


async def test_one_connection_too_many_is_refused_and_the_others_go_on() -> None:
    async with guarded(keys(), max_connections=2) as port:
        async with opened(port) as first, opened(port, OTHER_KEY) as second:
            answer = await knock(port, Door.UPGRADE, headers=bearer(KEY))

            check_refused(answer, 429, "rate_limit_exceeded")
            assert is_let_in(await knock(port, headers=bearer(KEY)), Door.HTTP)
            for socket in (first, second):
                await (await socket.ping())
        await until_let_in(port, KEY)


async def test_a_key_with_one_connection_too_many_leaves_room_for_others() -> None:
    async with guarded(keys(), max_connections_per_key=1) as port, opened(port):
        answer = await knock(port, Door.UPGRADE, headers=bearer(KEY))
        check_refused(answer, 429, "rate_limit_exceeded")

        answer = await knock(port, Door.UPGRADE, headers=bearer(OTHER_KEY))
        assert is_let_in(answer, Door.UPGRADE)


async def test_without_keys_all_share_one_limit() -> None:
    async with guarded(max_connections_per_key=1) as port, opened(port):
        answer = await knock(port, Door.UPGRADE)

        check_refused(answer, 429, "rate_limit_exceeded")


async def test_those_without_a_key_take_no_place() -> None:
    async with guarded(keys(), max_connections=1) as port:
        for _ in range(3):
            await knock(port, Door.UPGRADE)

        answer = await knock(port, Door.UPGRADE, headers=bearer(KEY))
        assert is_let_in(answer, Door.UPGRADE)


async def close(socket: ClientConnection) -> None:
    await socket.close()


async def abort(socket: ClientConnection) -> None:
    socket.transport.abort()


async def send_nonsense(socket: ClientConnection) -> None:
    socket.transport.write(b"\x83\x80\x00\x00\x00\x00")  # opcode 3 is reserved


async def make_it_fail(socket: ClientConnection) -> None:
    await socket.send("fail")


@pytest.mark.parametrize("leave", [close, abort, send_nonsense, make_it_fail])
async def test_whoever_leaves_makes_room_however_it_happens(
    leave: Callable[[ClientConnection], Any],
) -> None:
    async with guarded(keys(), max_connections=2, max_connections_per_key=2) as port:
        for _ in range(3):
            async with opened(port) as first, opened(port) as second:
                check_refused(
                    await knock(port, Door.UPGRADE, headers=bearer(KEY)), 429, "rate_limit_exceeded"
                )
                for socket in (first, second):
                    await leave(socket)
                    with suppress(ConnectionClosed):
                        while True:
                            await socket.recv()
            await until_free(port, places=2)


async def until_free(port: int, places: int) -> None:
    """Wait until all places are free: that many connections can be open at the same time."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await have_room(port, places):
            pass


async def have_room(port: int, places: int) -> bool:
    async with AsyncExitStack() as stack:
        for _ in range(places):
            try:
                await stack.enter_async_context(opened(port))
            except InvalidStatus:
                return False
    return True


async def test_an_upgrade_that_the_application_refuses_or_fails_takes_no_place() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/fail":
            raise ValueError
        await JSONResponse({}, status_code=404)(scope, receive, send)

    async with guarded(keys(), app, max_connections=1) as port:
        for path, status in (("/fail", 500), ("/nowhere", 404)) * 2:
            answer = await knock(port, Door.UPGRADE, path, headers=bearer(KEY))
            assert answer.status == status


async def test_what_is_no_request_is_passed_on() -> None:
    scopes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    await Access(app, keys(), Settings())({"type": "lifespan"}, receive, send)

    assert scopes == ["lifespan"]
