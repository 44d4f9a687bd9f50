"""What one API key has made is nothing to another: neither its responses nor its caches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from server.access import add_api_key
from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length, post, post_refused
from tests.server.models import OSLO, held_at
from tests.server.refusals import Refusal, refusal
from tests.server.running import BODY, Running, output, serving, text_in

QUESTION = {"role": "user", "content": BODY["input"]}
Headers = dict[str, str]


@asynccontextmanager
async def with_keys(
    number: int, path: Path, *script: str
) -> AsyncIterator[tuple[Running, list[Headers]]]:
    """Serve ``script`` to so many clients; give the server, and the headers of each."""
    file = path / "keys"
    keys = [add_api_key(file, f"client-{i}") for i in range(number)]
    settings = Settings(recent_responses=4, api_key_file=file)
    async with serving(*script, settings=settings) as server:
        yield server, [{"Authorization": f"Bearer {key}"} for key in keys]


@asynccontextmanager
async def two_keys(path: Path, *script: str) -> AsyncIterator[tuple[Running, Headers, Headers]]:
    """Serve ``script`` to Alice and Bob; give the server and their headers."""
    async with with_keys(2, path, *script) as (server, (alice, bob)):
        yield server, alice, bob


async def test_a_parent_of_another_key_is_not_found(tmp_path: Path) -> None:
    async with two_keys(tmp_path, "Sun.", "Rain.") as (server, alice, bob):
        parent = await post(server, headers=alice)
        members = {"previous_response_id": parent["id"], "input": "And now?"}
        refused = await post_refused(server, headers=bob, **members)
        followed = await post(server, headers=alice, **members)

        assert refused == Refusal(400, "previous_response_not_found", "previous_response_id")
        assert text_in(followed) == "Rain."


async def test_an_item_of_another_key_is_not_found(tmp_path: Path) -> None:
    async with two_keys(tmp_path, "Sun.", "Rain.") as (server, alice, bob):
        (item,) = (await post(server, headers=alice))["output"]
        reference = {"type": "item_reference", "id": item["id"]}
        members = {"input": [QUESTION, reference, QUESTION]}
        refused = await post_refused(server, headers=bob, **members)
        answered = await post(server, headers=alice, **members)

        assert refused == Refusal(400, "item_not_found", "input[1]")
        assert text_in(answered) == "Rain."


async def test_an_item_of_another_key_is_not_found_on_a_socket(tmp_path: Path) -> None:
    async with two_keys(tmp_path, "Sun.", "Rain.") as (server, alice, bob):
        (item,) = (await post(server, headers=alice))["output"]
        reference = {"type": "item_reference", "id": item["id"]}
        async with server.connect(headers=list(bob.items())) as client:
            await client.send("response.create", input=[QUESTION, reference, QUESTION])
            error = await client.error()

        assert error["error"]["code"] == "item_not_found"


async def test_the_history_of_another_key_is_computed_anew(tmp_path: Path) -> None:
    """How long the first token takes would tell that somebody else has said the same."""
    async with two_keys(tmp_path, OSLO, "Sun.") as (server, alice, bob):
        first = await post(server, headers=alice)
        (call,) = first["output"]
        history = [QUESTION, call, output(call)]
        of_bob = await post(server, headers=bob, input=history)
        of_alice = await post(server, headers=alice, input=history)

        assert cached_tokens(of_bob) == 0
        assert cached_tokens(of_alice) == context_length(first)


async def test_of_many_keys_the_caches_of_those_that_came_last_are_kept(tmp_path: Path) -> None:
    async with with_keys(18, tmp_path, "Sun.") as (server, clients):
        responses = [await post(server, headers=headers) for headers in clients]
        again = [await post(server, headers=clients[i]) for i in (-1, 0)]

        held = context_length(responses[0])
        assert server.engine.kv_tokens < 18 * held
        assert [cached_tokens(response) > 0 for response in again] == [True, False]


async def ask(server: Running, headers: Headers, method: str, path: str) -> httpx2.Response:
    """Return the answer to a request about a response."""
    async with server.http() as http:
        return await http.request(method, f"/v1/responses/{path}", headers=headers)


@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("POST", "/cancel"), ("DELETE", "")])
async def test_a_background_response_of_another_key_is_not_found(
    method: str, suffix: str, tmp_path: Path
) -> None:
    async with two_keys(tmp_path, "Sun.Sun.") as (server, alice, bob):
        with held_at(2, server.engine) as model:
            response = await post(server, headers=alice, background=True)
            await model.reached.wait()
            path = response["id"]
            answers = [await ask(server, bob, method, path + suffix)]
            model.release()
            told = await ask(server, alice, "GET", f"{path}?stream=true")
        answers += [await ask(server, bob, method, path + suffix)]

        for answer in answers:
            refused = refusal(answer.status_code, answer.json()["error"])
            assert refused == Refusal(404, "response_not_found")
        assert "response.completed" in told.text
        assert (await ask(server, alice, "GET", path)).json()["status"] == "completed"
