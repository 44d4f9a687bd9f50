"""``text.format``: the answer is JSON of the form asked for, and calls are as free as ever."""

import json
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.http_client import (
    cached_tokens,
    context_length,
    post,
    post_refused,
    post_streamed,
)
from tests.server.models import OSLO, THOUGHT, scripted_engine
from tests.server.refusals import Refusal
from tests.server.running import BODY, TOOL, Event, Running, calls_in, output, serving, text_in
from tests.tiny_model import tiny_model

WORD: Event = {"type": "string", "maxLength": 6}
REPORT: Event = {
    "type": "object",
    "properties": {"city": WORD, "is_dry": {"type": "boolean"}},
    "required": ["city", "is_dry"],
    "additionalProperties": False,
}
ANSWER = '{"city": "Oslo", "is_dry": true}'

SCHEMAS: dict[str, Event] = {
    "an object": REPORT,
    "what zod makes for the AI SDK": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "name": WORD,
            "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    },
    "what pydantic makes, with references": {
        "$defs": {
            "Sky": {"enum": ["clear", "grey"], "title": "Sky", "type": "string"},
            "Day": {
                "properties": {"sky": {"$ref": "#/$defs/Sky"}},
                "required": ["sky"],
                "title": "Day",
                "type": "object",
                "additionalProperties": False,
            },
        },
        "properties": {"days": {"items": {"$ref": "#/$defs/Day"}, "type": "array", "maxItems": 2}},
        "required": ["days"],
        "title": "Forecast",
        "type": "object",
        "additionalProperties": False,
    },
    "alternatives, and what may be null": {
        "type": "object",
        "properties": {
            "wind": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
            "from": {"type": ["string", "null"], "enum": ["N", "S", None]},
        },
        "required": ["wind", "from"],
        "additionalProperties": False,
    },
    "an array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
}


def text_format(schema: Event = REPORT, **members: Any) -> Event:
    """Return the ``text`` of a request that wants ``schema``."""
    return {"format": {"type": "json_schema", "name": "report", "schema": schema} | members}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def random_server() -> Any:
    """A server whose model says anything: what it says well, it was made to."""
    async with serving(engine=LocalEngine(tiny_model(), max_forced_string=8)) as server:
        yield server


# --- What is said --------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_an_answer_parses_and_validates(
    name: str, strict: bool | None, random_server: Running
) -> None:
    schema = SCHEMAS[name]
    for seed in range(2):
        response = await post(
            random_server, tools=[], text=text_format(schema, strict=strict), seed=seed
        )

        assert response["status"] == "completed"
        jsonschema.validate(json.loads(text_in(response)), schema)


@pytest.mark.asyncio(loop_scope="module")
async def test_with_tools_an_answer_is_calls_or_json(random_server: Running) -> None:
    parameters = {"type": "object", "properties": {"city": WORD}, "required": ["city"]}
    tool = TOOL | {"parameters": parameters | {"additionalProperties": False}}
    said: Event = {"tools": [tool], "parallel_tool_calls": False, "text": text_format()}
    kinds = set()
    for seed in range(4):
        (item,) = (await post(random_server, **said, seed=seed))["output"]

        kinds.add(item["type"])
        if item["type"] == "function_call":
            jsonschema.validate(json.loads(item["arguments"]), parameters)
        else:
            jsonschema.validate(json.loads(item["content"][0]["text"]), REPORT)
    assert kinds == {"message", "function_call"}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_json_object_is_an_object_whatever_the_model_would_rather_say(
    random_server: Running,
) -> None:
    text = {"format": {"type": "json_object"}}
    response = await post(random_server, tools=[], text=text, seed=0, max_output_tokens=40)

    assert text_in(response).startswith("{")
    if response["status"] == "completed":
        assert isinstance(json.loads(text_in(response)), dict)


async def test_a_json_object_may_be_any() -> None:
    said = '{"a": [1, {"b": null}], "c": "æ {"}'
    async with serving(said) as server:
        response = await post(server, text={"format": {"type": "json_object"}})

        assert text_in(response) == said


async def test_a_model_that_thinks_thinks_before_it_answers() -> None:
    async with serving(engine=scripted_engine(THOUGHT + ANSWER, thinks=True)) as server:
        response = await post(server, text=text_format(strict=True))

        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert text_in(response) == ANSWER


async def test_an_answer_that_is_cut_short_is_incomplete() -> None:
    async with serving(ANSWER) as server:
        response = await post(server, text=text_format(), max_output_tokens=5)

        assert response["status"] == "incomplete"
        assert response["output"][0]["status"] == "incomplete"
        assert ANSWER.startswith(text_in(response))


async def test_the_format_is_repeated() -> None:
    async with serving(ANSWER) as server:
        response = await post(server, text=text_format(strict=True) | {"verbosity": "low"})

        assert response["text"] == {
            "format": {
                "type": "json_schema",
                "name": "report",
                "description": None,
                "schema": REPORT,
                "strict": True,
            },
            "verbosity": "low",
        }


# --- Rounds of calls: Codex and the Agents SDK send the format with every round -------------------


async def test_a_format_does_not_bind_rounds_of_calls_with_the_whole_history() -> None:
    settings = Settings(recent_responses=4)
    async with serving(OSLO, ANSWER, settings=settings) as server:
        question = {"role": "user", "content": BODY["input"]}
        first = await post(server, text=text_format(strict=True))
        (call,) = first["output"]
        history = [question, call, output(call)]
        last = await post(server, text=text_format(strict=True), input=history)

        assert call["type"] == "function_call"
        assert text_in(last) == ANSWER
        assert cached_tokens(last) == context_length(first)


async def test_a_format_does_not_bind_rounds_of_calls_in_a_chain() -> None:
    async with serving(OSLO, ANSWER) as server:
        parent = await post_streamed(server, text=text_format(strict=True))
        (call,) = calls_in(parent)
        last = await post_streamed(
            server,
            text=text_format(strict=True),
            previous_response_id=parent[-1]["response"]["id"],
            input=[output(call)],
        )

        assert text_in(last[-1]["response"]) == ANSWER


@pytest.mark.parametrize("dialect", ["append", "inject"])
async def test_a_format_does_not_bind_rounds_of_calls_in_a_suspended_run(dialect: str) -> None:
    async with serving(OSLO, ANSWER) as server, server.connect(dialect) as client:
        await client.send("response.create", **BODY, text=text_format(strict=True))
        events = [await client.receive()]
        while not calls_in(events):
            events.append(await client.receive())
        if dialect == "append":
            await client.segment()
            last = await client.append(output(calls_in(events)[0]))
        else:
            response_id = events[0]["response"]["id"]
            outputs = [output(calls_in(events)[0])]
            await client.send("response.inject", response_id=response_id, input=outputs)
            last = await client.segment()

        assert text_in(last[-1]["response"]) == ANSWER


async def test_a_forced_call_comes_before_the_answer() -> None:
    async with serving(OSLO, ANSWER) as server, server.connect("append") as client:
        first = await client.create(text=text_format(strict=True), tool_choice="required")
        last = await client.append(output(calls_in(first)[0]))

        assert text_in(last[-1]["response"]) == ANSWER


# --- Formats that cannot be kept -----------------------------------------------------------------

BAD_FORMATS: dict[str, tuple[Event, Refusal]] = {
    "a type that is none": (
        text_format({"type": "tuple"}),
        Refusal(400, "invalid_value", "text.format.schema"),
    ),
    "a keyword that cannot be enforced": (
        text_format({"type": "object", "not": {"required": ["x"]}}),
        Refusal(400, "invalid_value", "text.format.schema"),
    ),
    "a schema that nothing satisfies": (
        text_format({"type": "object", "properties": {"x": False}, "required": ["x"]}),
        Refusal(400, "invalid_value", "text.format.schema"),
    ),
    "a reference that leads nowhere": (
        text_format({"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}}),
        Refusal(400, "invalid_value", "text.format.schema"),
    ),
    "no schema": (
        {"format": {"type": "json_schema", "name": "report"}},
        Refusal(400, "missing_required_parameter", "text.format.schema"),
    ),
    "no name": (
        {"format": {"type": "json_schema", "schema": REPORT}},
        Refusal(400, "missing_required_parameter", "text.format.name"),
    ),
    "a schema that is no object": (
        {"format": {"type": "json_schema", "name": "report", "schema": "any"}},
        Refusal(400, "invalid_type", "text.format.schema"),
    ),
    "the nesting of Chat Completions": (
        {"format": {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}},
        Refusal(400, "missing_required_parameter", "text.format.name"),
    ),
    "an unknown kind": (
        {"format": {"type": "grammar"}},
        Refusal(400, "invalid_value", "text.format.type"),
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_FORMATS)
async def test_a_format_that_cannot_be_kept_is_refused(
    name: str, stream: bool, random_server: Running
) -> None:
    text, expected = BAD_FORMATS[name]

    assert await post_refused(random_server, text=text, stream=stream) == expected
    assert random_server.engine.runs == ()
