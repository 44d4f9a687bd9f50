"""What names of models mean to each client of the server."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.ledger import Total, read_totals
from server.response_store import ResponseStore, StoredResponse
from server.settings import Settings
from tests.server.http_client import cached_tokens, post, post_refused, post_streamed
from tests.server.models import OSLO, context_text, held_at
from tests.server.refusals import Refusal, refusal
from tests.server.running import (
    BODY,
    CLOSING,
    Client,
    Event,
    Running,
    calls_in,
    output,
    serving,
    text_in,
)

DIALECTS = ["append", "inject", "chained"]

FILE = """
default = "assistant"

[alias]
"gpt-5-codex" = "careful"
"gpt-5-mini" = "tiny"
codex = "gpt-5-codex"

[split.assistant]
tiny = 1
careful = 1

[model.careful]
of = "tiny"
temperature = 0.25
max_output_tokens = 8
instructions = "Think twice."
reasoning = { effort = "low" }

[price.tiny]
input = 1
cached_input = 0.5
output = 2

[price.careful]
input = 10
output = 20
"""
"""The model itself, and one way to run it under three names."""

WORDS = "Sun." * 20
NO_SUCH_MODEL = Refusal(404, "model_not_found", "model")


@asynccontextmanager
async def naming(
    folder: Path, *script: str, beginning: str = "", **options: Any
) -> AsyncIterator[Running]:
    """Serve a model that says ``script``, by the names of the file and what stands before it."""
    path = folder / "models.toml"
    path.write_text(beginning + FILE)
    options = {"recent_responses": 0} | options
    settings = Settings(models_file=path, **options)
    async with serving(*script, settings=settings) as server:
        yield server


def check_is_careful(response: Event) -> None:
    """Check that a response says that it was asked for as ``FILE`` configures it."""
    assert response["model"] == "careful"
    assert response["temperature"] == 0.25
    assert response["max_output_tokens"] == 8
    assert response["instructions"] == "Think twice."
    assert response["reasoning"]["effort"] == "low"


async def refused(client: Client) -> Refusal:
    """Return what the error frame says that must come next."""
    frame = await client.error()
    return refusal(frame["status"], frame["error"])


# --- Each way to ask -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["careful", "gpt-5-codex", "codex"])
async def test_over_http_a_configuration_runs_under_all_its_names(
    model: str, tmp_path: Path
) -> None:
    async with naming(tmp_path, WORDS) as server:
        response = await post(server, model=model)
        events = await post_streamed(server, model=model)

        for told in (response, *(event["response"] for event in events if "response" in event)):
            check_is_careful(told)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == 8
        assert "Think twice." in context_text(server.engine)


@pytest.mark.parametrize("model", ["careful", "gpt-5-codex", "codex"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_over_a_websocket_a_configuration_runs_under_all_its_names(
    dialect: str, model: str, tmp_path: Path
) -> None:
    async with naming(tmp_path, WORDS) as server, server.connect(dialect) as client:
        events = await client.create(model=model)

        for event in (events[0], events[1], events[-1]):
            check_is_careful(event["response"])
        assert events[-1]["response"]["usage"]["output_tokens"] == 8
        assert "Think twice." in context_text(server.engine)


async def test_what_is_stored_says_which_configuration_it_was(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server, server.http() as http:
        response = await post(server, model="codex")
        events = await post_streamed(server, model="codex", background=True)
        for response_id in (response["id"], events[-1]["response"]["id"]):
            found = (await http.get(f"/v1/responses/{response_id}")).json()

            check_is_careful(found)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_a_request_says_wins_over_what_is_configured(
    dialect: str, tmp_path: Path
) -> None:
    own: Event = {
        "temperature": 0,
        "max_output_tokens": 30,
        "instructions": "Be quick.",
        "reasoning": {"effort": "high"},
    }
    async with naming(tmp_path, WORDS) as server, server.connect(dialect) as client:
        over_http = await post(server, model="codex", **own)
        events = await client.create(model="codex", **own)

        for told in (over_http, events[-1]["response"]):
            assert told["model"] == "careful"
            assert told["reasoning"]["effort"] == "high"
            assert {key: told[key] for key in own if key != "reasoning"} == {
                key: value for key, value in own.items() if key != "reasoning"
            }
            assert text_in(told) == WORDS
        assert "Think twice." not in context_text(server.engine)


async def test_null_is_what_is_configured(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server:
        response = await post(
            server, model="codex", temperature=None, max_output_tokens=None, instructions=None
        )

        check_is_careful(response)


async def test_the_model_s_own_name_has_no_defaults(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server:
        response = await post(server, model="gpt-5-mini")

        assert response["model"] == "tiny"
        assert response["max_output_tokens"] is None
        assert response["instructions"] is None
        assert text_in(response) == WORDS


async def test_the_operator_s_limit_is_one_for_what_is_configured_too(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS, max_output_tokens=5) as server:
        response = await post(server, model="careful")

        assert response["usage"]["output_tokens"] == 5


# --- Names that nobody knows, and requests that name none ----------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_name_that_nobody_knows_is_refused(dialect: str, tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server, server.connect(dialect) as client:
        over_http = await post_refused(server, model="gpt-9")
        await client.send("response.create", **(BODY | {"model": "gpt-9"}))
        error = await refused(client)
        again = await client.create(model="codex")

        assert over_http == error == NO_SUCH_MODEL
        check_is_careful(again[-1]["response"])


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/responses/input_tokens"])
async def test_a_name_that_nobody_knows_is_refused_by_the_other_routes(
    path: str, tmp_path: Path
) -> None:
    async with naming(tmp_path, WORDS) as server, server.http() as http:
        answer = await http.post(path, json={"model": "gpt-9", "input": "Hi."})

        assert refusal(answer.status_code, answer.json()["error"]) == NO_SUCH_MODEL


async def test_with_a_fallback_any_name_is_answered_to(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS, beginning='fallback = "codex"') as server:
        async with server.connect() as client:
            response = await post(server, model="gpt-9")
            events = await client.create(model="gpt-9")

        check_is_careful(response)
        check_is_careful(events[-1]["response"])


async def test_a_request_that_names_none_gets_the_default(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server, server.connect() as client:
        keyed: Event = {"prompt_cache_key": key_of("careful")}
        response = await post(server, **keyed)
        events = await client.create(**keyed)

        check_is_careful(response)
        check_is_careful(events[-1]["response"])


@pytest.mark.parametrize("model", ["", 5, ["careful"]])
async def test_what_is_no_name_is_refused(model: object, tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server, server.connect() as client:
        over_http = await post_refused(server, model=model)
        await client.send("response.create", **(BODY | {"model": model}))
        error = await refused(client)

        assert over_http == error
        assert (error.status, error.param) == (400, "model")


# --- Splits --------------------------------------------------------------------------------------


def key_of(model: str) -> str:
    """Return a key whose conversations go to ``model``, as the file has it."""
    return {"careful": "conversation 3", "tiny": "conversation 0"}[model]


@pytest.mark.parametrize("member", ["prompt_cache_key", "safety_identifier", "user"])
async def test_a_conversation_goes_the_same_way_however_it_is_asked_for(
    member: str, tmp_path: Path
) -> None:
    async with naming(tmp_path, WORDS) as server, server.connect("append") as client:
        for model in ("careful", "tiny"):
            keyed: Event = {member: key_of(model), "model": "assistant"}
            response = await post(server, **keyed)
            events = await client.create(**keyed)

            assert response["model"] == events[-1]["response"]["model"] == model


async def test_connections_without_a_key_go_either_way_each_with_all_it_says(
    tmp_path: Path,
) -> None:
    async with naming(tmp_path, "Sun.") as server:
        models = set[str]()
        while models != {"careful", "tiny"}:
            async with server.connect() as client:
                told = [(await client.create())[-1]["response"]["model"] for _ in range(3)]
            assert len(set(told)) == 1
            models |= {*told}


async def test_requests_without_a_key_go_either_way(tmp_path: Path) -> None:
    async with naming(tmp_path, "Sun.") as server:
        models = set[str]()
        while models != {"careful", "tiny"}:
            models.add((await post(server, model="assistant"))["model"])


# --- Going on ------------------------------------------------------------------------------------


async def test_a_continuation_may_use_the_name_again(tmp_path: Path) -> None:
    async with naming(tmp_path, OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(model="codex", store=False)
        (call,) = calls_in(first)
        last = await client.follow(first[-1]["response"], output(call), model="codex")

        check_is_careful(last[-1]["response"])
        assert text_in(last[-1]["response"]) == "Sun."
        before = first[-1]["response"]["usage"]["total_tokens"]
        assert cached_tokens(last[-1]["response"]) == before - 1


async def test_a_continuation_may_use_the_name_that_the_response_said(tmp_path: Path) -> None:
    async with naming(tmp_path, OSLO, "Sun.") as server:
        first = await post(server, model="codex")
        (call,) = first["output"]
        last = await post(
            server, model=first["model"], previous_response_id=first["id"], input=[output(call)]
        )

        check_is_careful(last)
        assert text_in(last) == "Sun."


@pytest.mark.parametrize("recent_responses", [0, 4])
async def test_what_follows_a_response_by_a_name_that_is_split_is_of_the_same_model(
    recent_responses: int, tmp_path: Path
) -> None:
    async with naming(tmp_path, "Rain.", "Sun.", recent_responses=recent_responses) as server:
        for model in ("careful", "tiny"):
            first = await post(server, model="assistant", prompt_cache_key=key_of(model))
            for _ in range(8):
                last = await post(server, model="assistant", previous_response_id=first["id"])

                assert last["model"] == model


@pytest.mark.parametrize("model", ["careful", "tiny"])
async def test_what_follows_a_response_that_is_still_in_progress_is_of_the_same_model(
    model: str, tmp_path: Path
) -> None:
    async with naming(tmp_path, "Rain.", "Sun.") as server:
        for _ in range(6):
            async with server.connect() as client:
                keyed: Event = {"model": "assistant", "prompt_cache_key": key_of(model)}
                await client.send("response.create", **(BODY | keyed))
                parent = (await client.receive())["response"]
                with held_at(1, server.engine) as held:
                    asked: Event = {"model": "assistant", "previous_response_id": parent["id"]}
                    await client.send("response.create", **(BODY | asked))
                    await client.until_taken()
                    held.release()
                    await client.segment()
                last = (await client.segment())[-1]["response"]

            assert last["model"] == model


async def test_a_split_name_does_not_have_other_lanes_wait_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    async def get_later(store: ResponseStore, key: str, response_id: str) -> StoredResponse | None:
        await asyncio.to_thread(free.wait, 20)
        return await get(store, key, response_id)

    async with naming(tmp_path, "Sun.") as server:
        first = await post(server, model="tiny")
        get = ResponseStore.get
        monkeypatch.setattr(ResponseStore, "get", get_later)
        async with server.connect() as client:
            asked: Event = {"model": "assistant", "previous_response_id": first["id"]}
            await client.send("response.create", **(BODY | asked), stream_id="waits")
            other = await client.create(model="tiny", store=False, stream_id="goes_on")
            free.set()
            last = await client.segment()

        assert other[-1]["stream_id"] == "goes_on"
        assert last[-1]["stream_id"] == "waits"


async def test_a_connection_follows_what_another_has_stored_by_the_same_model(
    tmp_path: Path,
) -> None:
    async with naming(tmp_path, "Rain.", "Sun.") as server:
        for model in ("careful", "tiny"):
            first = await post(server, model="assistant", prompt_cache_key=key_of(model))
            for _ in range(6):
                async with server.connect() as client:
                    events = await client.create(previous_response_id=first["id"])

                assert events[-1]["response"]["model"] == model


async def test_what_follows_a_response_can_be_of_another_model_that_it_names(
    tmp_path: Path,
) -> None:
    async with naming(tmp_path, "Rain.", "Sun.") as server:
        first = await post(server, model="careful")
        last = await post(server, model="tiny", previous_response_id=first["id"])

        assert last["model"] == "tiny"


async def test_tokens_are_counted_for_the_model_that_is_followed(tmp_path: Path) -> None:
    async with naming(tmp_path, "Rain.", "Sun.") as server, server.http() as http:
        first = await post(server, model="assistant", prompt_cache_key=key_of("careful"))
        asked = {"previous_response_id": first["id"], "input": "Really?"}
        counts = []
        for model in ["careful", *["assistant"] * 8]:
            answer = await http.post("/v1/responses/input_tokens", json=asked | {"model": model})
            counts.append(answer.json()["input_tokens"])

        assert len(set(counts)) == 1


async def test_what_is_compacted_is_in_the_books_of_the_model_that_is_followed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    async with naming(tmp_path, "Rain.", "Sun.", data_dir=folder) as server, server.http() as http:
        first = await post(server, model="assistant", prompt_cache_key=key_of("careful"))
        asked = {"previous_response_id": first["id"], "model": "assistant"}
        for _ in range(8):
            answer = await http.post("/v1/responses/compact", json=asked)
            assert answer.status_code == 200

    (total,) = read_totals(folder)
    assert (total.model, total.num_runs) == ("careful", 9)


@pytest.mark.parametrize("dialect", ["append", "inject"])
async def test_a_suspended_response_stays_what_it_is(dialect: str, tmp_path: Path) -> None:
    async with naming(tmp_path, OSLO, WORDS) as server, server.connect(dialect) as client:
        await client.send("response.create", **(BODY | {"model": "codex"}))
        (call,) = await client.calls(1)
        response_id = client.streams[0][0]["response"]["id"]
        target = {} if dialect == "append" else {"response_id": response_id}
        await client.send(f"response.{dialect}", input=[output(call)], **target)
        last = await client.up_to("response.incomplete")

        check_is_careful(last[-1]["response"])
        assert text_in(last[-1]["response"]) == "Sun." * 8


async def test_an_append_to_a_response_that_is_over_is_answered_by_the_same_model(
    tmp_path: Path,
) -> None:
    async with naming(tmp_path, "Rain.", WORDS) as server, server.connect("append") as client:
        await client.create(model="codex")
        last = await client.append({"role": "user", "content": "Really?"})

        check_is_careful(last[-1]["response"])
        assert text_in(last[-1]["response"]) == "Sun." * 8


async def test_the_successor_of_a_steered_response_is_of_its_model(tmp_path: Path) -> None:
    async with naming(tmp_path, "Rain." * 2, WORDS) as server, server.connect() as client:
        with held_at(2, server.engine) as model:
            await client.send("response.create", **(BODY | {"model": "codex", "store": False}))
            await model.reached.wait()
            target = (await client.receive())["response"]["id"]
            await client.send("response.steer", previous_response_id=target, input="Go on.")
            await client.until_taken()
            model.release()
            await client.segment()
        last = await client.segment()

        assert last[-1]["response"]["previous_response_id"] == target
        check_is_careful(last[-1]["response"])


# --- The other routes ----------------------------------------------------------------------------


async def test_all_names_are_listed_and_can_be_asked_for(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server, server.http() as http:
        listed = (await http.get("/v1/models")).json()["data"]
        found = [(await http.get(f"/v1/models/{model['id']}")).json() for model in listed]

        names = ["tiny", "careful", "gpt-5-codex", "gpt-5-mini", "codex", "assistant"]
        assert [model["id"] for model in listed] == names
        assert found == listed


async def test_what_only_a_fallback_answers_to_is_not_listed(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS, beginning='fallback = "codex"') as server:
        async with server.http() as http:
            answer = await http.get("/v1/models/gpt-9")

        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_configured_instructions_count_as_tokens(tmp_path: Path) -> None:
    async with naming(tmp_path, WORDS) as server, server.http() as http:
        counts = []
        for model in ("tiny", "codex"):
            body = {"model": model, "input": "Hi."}
            answer = await http.post("/v1/responses/input_tokens", json=body)
            counts.append(answer.json()["input_tokens"])
        response = await post(server, model="codex", input="Hi.", tools=[])

        assert counts[0] < counts[1] == response["usage"]["input_tokens"]


async def test_a_conversation_is_compacted_by_any_name_and_without_its_defaults(
    tmp_path: Path,
) -> None:
    async with naming(tmp_path, WORDS, data_dir=tmp_path / "data") as server:
        async with server.http() as http:
            body = {"model": "codex", "input": "Is it dry in Oslo?"}
            answer = await http.post("/v1/responses/compact", json=body)

        compacted = answer.json()
        assert answer.status_code == 200
        assert compacted["usage"]["output_tokens"] > 8
        assert "Think twice." not in context_text(server.engine)
    (total,) = read_totals(tmp_path / "data")
    assert total.model == "careful"


# --- The books -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_each_configuration_has_its_account_and_its_price(
    dialect: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    async with naming(tmp_path, "Sun.", data_dir=folder) as server:
        async with server.connect(dialect) as client:
            for model in ("tiny", "gpt-5-mini", "careful", "codex"):
                await client.create(model=model)
        for model in ("gpt-5-mini", "gpt-5-codex"):
            await post(server, model=model)
        closed = [event for stream in client.streams for event in stream]
        told = [event["response"] for event in closed if event["type"] in CLOSING]

    careful, tiny = read_totals(folder)
    assert (careful.model, tiny.model) == ("careful", "tiny")
    for total, price in ((careful, (10, 10, 20)), (tiny, (1, 0.5, 2))):
        assert total.num_runs == 3
        assert total.cost_nanodollars == cost(total, *price)
        own = [response for response in told if response["model"] == total.model]
        # The request over HTTP came to as much as the first of the connection.
        assert total.output_tokens == sum(usage["usage"]["output_tokens"] for usage in own) * 3 // 2


def cost(total: Total, input: float, cached: float, output: float) -> float:
    """Return what the tokens cost in nano-dollars, at dollars per million tokens."""
    computed = total.input_tokens - total.cached_tokens
    return 1000 * (computed * input + total.cached_tokens * cached + total.output_tokens * output)
