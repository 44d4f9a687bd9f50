"""What a request may hold besides: what is honoured, what is repeated, and what is read over."""

import gzip
from typing import Any

import pytest
import zstandard

from protocol.codec import decode_object, encode
from server.settings import Settings
from tests.server.http_client import cached_tokens, post, post_refused, post_streamed
from tests.server.models import OSLO, inputs_of, scripted_engine
from tests.server.refusals import Refusal
from tests.server.running import BODY, TOOL, Event, Running, output, serving, text_in

QUESTION = {"role": "user", "content": BODY["input"]}


def read_text(server: Running) -> str:
    """Return all that the model read, as text; control tokens are left out."""
    tokenizer = server.engine.model.tokenizer
    return b"".join(map(tokenizer.token_bytes, inputs_of(server.engine))).decode()


# --- Obfuscation ---------------------------------------------------------------------------------


async def test_deltas_are_padded_if_that_is_asked_for() -> None:
    asked = {"stream_options": {"include_obfuscation": True}}
    async with serving(f"Rain.Rain.Rain.Rain.{OSLO}") as server:
        events = await post_streamed(server, **asked)

        deltas = [event for event in events if event["type"].endswith(".delta")]
        assert {event["type"] for event in deltas} == {
            "response.output_text.delta",
            "response.function_call_arguments.delta",
        }
        assert len({event["obfuscation"] for event in deltas}) > 1
        assert all("obfuscation" in event for event in deltas)


@pytest.mark.parametrize("options", [None, {}, {"include_obfuscation": False}])
async def test_deltas_are_as_they_are_otherwise(options: Event | None) -> None:
    async with serving(f"Rain.{OSLO}") as server:
        events = await post_streamed(server, stream_options=options)

        assert all("obfuscation" not in event for event in events)


# --- Metadata ------------------------------------------------------------------------------------


async def test_metadata_up_to_the_limits_is_repeated() -> None:
    metadata = {f"{i:064}": "v" * 512 for i in range(16)}
    async with serving("Sun.") as server:
        response = await post(server, metadata=metadata)

        assert response["metadata"] == metadata


@pytest.mark.parametrize(
    "metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}]
)
async def test_metadata_beyond_the_limits_is_refused(metadata: Event) -> None:
    async with serving("Sun.") as server:
        refused = await post_refused(server, metadata=metadata)

        assert (refused.status, refused.code) == (400, "invalid_value")
        assert str(refused.param).startswith("metadata")


# --- Truncation ----------------------------------------------------------------------------------


def long_history(num_rounds: int) -> list[Event]:
    rounds = (
        (
            {"role": "user", "content": f"Question {i}? {'x' * 50}"},
            {"role": "assistant", "content": f"A{i}."},
        )
        for i in range(num_rounds)
    )
    return [*(item for each in rounds for item in each), {"role": "user", "content": "Last one?"}]


@pytest.mark.parametrize("truncation", ["disabled", None])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_is_refused(truncation: str | None, stream: bool) -> None:
    async with serving(engine=scripted_engine("Sun.", max_context=600)) as server:
        refused = await post_refused(
            server, input=long_history(20), truncation=truncation, stream=stream
        )

        assert refused == Refusal(400, "context_length_exceeded", "input")


async def test_the_oldest_turns_make_room_if_they_may() -> None:
    script = ["Sun."] * 20  # the model answers what it sees, be it the first turn or the last
    async with serving(engine=scripted_engine(*script, max_context=600)) as server:
        response = await post(
            server, input=long_history(20), truncation="auto", instructions="Be brief."
        )

        assert response["truncation"] == "auto"
        assert response["status"] == "completed"
        assert response["usage"]["input_tokens"] < 600
        assert "Be brief." in read_text(server)
        assert "Last one?" in read_text(server)
        assert "Question 0?" not in read_text(server)


async def test_even_then_the_last_turn_has_to_fit() -> None:
    async with serving(engine=scripted_engine("Sun.", max_context=300)) as server:
        refused = await post_refused(server, input="x" * 400, truncation="auto")

        assert refused == Refusal(400, "context_length_exceeded", "input")


async def test_what_fits_is_left_as_it_is() -> None:
    async with serving("Sun.", settings=Settings(recent_responses=4)) as server:
        first = await post(server)
        second = await post(server, truncation="auto")

        assert cached_tokens(second) == first["usage"]["input_tokens"] - 1


# --- Content -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
@pytest.mark.parametrize("role", ["user", "system"])
async def test_what_is_not_text_is_refused_by_its_place(kind: str, role: str) -> None:
    parts = [{"type": "input_text", "text": "?"}, {"type": kind, "image_url": "data:,"}]
    async with serving("Sun.") as server:
        refused = await post_refused(server, input=[QUESTION, {"role": role, "content": parts}])

        assert refused == Refusal(400, "unsupported_content", "input[1].content[1]")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("dry Æ ☀", "dry Æ ☀"),
        ([{"type": "input_text", "text": "dry "}, {"type": "output_text", "text": "Æ"}], "dry Æ"),
        ([{"type": "structured", "degrees": 7}], '{"type":"structured","degrees":7}'),
        (["a", 1], '"a"1'),
        ({"degrees": 7}, '{"degrees":7}'),
        ("", ""),
        ([], ""),
    ],
)
async def test_the_output_of_a_tool_may_be_text_parts_or_data(given: Any, read: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
    async with serving("Sun.", "Sun.") as server:
        response = await post(server, input=[QUESTION, call, output("c", given)])

        assert text_in(response) == "Sun."
        assert f"<tool_response>\n{read}\n</tool_response>" in read_text(server)


async def test_the_output_of_a_tool_may_be_no_image() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:,"}
    async with serving("Sun.") as server:
        refused = await post_refused(server, input=[QUESTION, call, output("c", [image])])

        assert refused == Refusal(400, "unsupported_content", "input[2].output[0]")


UNKNOWN_ITEMS: list[Event] = [
    {"type": "agent_message", "author": "x", "content": []},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "context_compaction", "id": "x"},
    {"type": "compaction_trigger"},
    {"type": "local_shell_call", "call_id": "c", "action": {}},
    {"type": "x_vendor:thing", "anything": [1]},
]
UNKNOWN_TOOLS: list[Event] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "tool_search"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "x_vendor", "name": "whatever it is"},
]


async def test_items_and_tools_that_nobody_knows_are_read_over() -> None:
    async with serving("Sun.", settings=Settings(recent_responses=4)) as server:
        plain = await post(server, input=[QUESTION])
        items = [UNKNOWN_ITEMS[0], QUESTION, *UNKNOWN_ITEMS[1:]]
        # Checked by nobody's types: some are known to none.
        async with server.http() as http:
            body = BODY | {"input": items, "tools": [*UNKNOWN_TOOLS, TOOL]}
            answer = await http.post("/v1/responses", json=body)
        response = decode_object(answer.content)

        assert text_in(response) == "Sun."
        assert cached_tokens(response) == plain["usage"]["input_tokens"] - 1
        assert response["tools"][:-1] == UNKNOWN_TOOLS


async def test_members_that_nobody_knows_are_read_over() -> None:
    async with serving("Sun.", settings=Settings(recent_responses=4)) as server:
        plain = await post(server)
        response = await post(
            server,
            client_metadata={"x-codex-turn-metadata": "{}"},
            access_programs=["x"],
            moderation=None,
            image={"quality": "high"},
            x_vendor=[1],
            include=["web_search_call.action.sources", "file_search_call.results"],
            prompt_cache_options={"mode": "x"},
            prompt_cache_retention="24h",
            user="u",
            service_tier="fast",
            max_tool_calls=3,
        )

        assert response["status"] == "completed"
        assert cached_tokens(response) == plain["usage"]["input_tokens"] - 1


# --- Input tokens --------------------------------------------------------------------------------


async def input_tokens(server: Running, **members: Any) -> int:
    async with server.http() as http:
        answer = await http.post("/v1/responses/input_tokens", json=BODY | members)
    counted: Event = answer.json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    return int(counted["input_tokens"])


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"tools": []},
        {"instructions": "Be brief. Æ"},
        {"input": [QUESTION, {"role": "assistant", "content": "Hm."}, QUESTION]},
        {"tools": [{"type": "custom", "name": "run"}, {"type": "web_search"}]},
        {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "none"}},
    ],
)
async def test_input_tokens_are_counted_as_they_are_billed(members: Event) -> None:
    async with serving(*["Sun."] * 3, settings=Settings(recent_responses=4)) as server:
        counted = await input_tokens(server, **members)
        passes = server.engine.counters.forward_passes
        response = await post(server, **members, max_output_tokens=1)

        assert counted == response["usage"]["input_tokens"]
        assert passes == 0


async def test_input_tokens_of_a_follower_are_those_of_the_whole_conversation() -> None:
    async with serving(OSLO, "Sun.", settings=Settings(recent_responses=4)) as server:
        first = await post(server)
        members: Event = {
            "previous_response_id": first["id"],
            "input": [output(first["output"][0])],
        }
        counted = await input_tokens(server, **members)
        response = await post(server, **members)

        assert counted == response["usage"]["input_tokens"]


@pytest.mark.parametrize("truncation", ["disabled", "auto"])
async def test_input_tokens_are_counted_of_what_does_not_fit(truncation: str) -> None:
    async with serving(engine=scripted_engine("Sun.", max_context=300)) as server:
        counted = await input_tokens(server, input="x" * 1000, truncation=truncation)

        assert counted > 1000


async def test_input_tokens_of_what_is_wrong_are_refused() -> None:
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.post(
            "/v1/responses/input_tokens", json=BODY | {"previous_response_id": "resp_1"}
        )

        assert answer.json()["error"]["code"] == "previous_response_not_found"


# --- Ways in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/codex/responses"])
async def test_a_compressed_body_is_read(encoding: str, path: str) -> None:
    body = encode(BODY)
    packed = gzip.compress(body) if encoding == "gzip" else zstandard.compress(body)
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.post(path, content=packed, headers={"Content-Encoding": encoding})

        assert text_in(answer.json()) == "Sun."


async def test_the_path_of_codex_leads_to_the_same_place() -> None:
    async with serving(OSLO, "Sun.", settings=Settings(recent_responses=4)) as server:
        async with server.http() as http:
            first = (await http.post("/v1/codex/responses", json=BODY)).json()
        async with server.connect(path="/v1/codex/responses") as client:
            last = await client.create(
                previous_response_id=first["id"], input=[output(first["output"][0])]
            )

        assert text_in(last[-1]["response"]) == "Sun."
