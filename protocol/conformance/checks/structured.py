"""Output that has to have a form: arguments, free-form input, the text, and its probabilities."""

import re
from typing import Any

from protocol.codec import decode_object
from protocol.conformance.actions import Scenario
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.json_schema import mismatch
from protocol.conformance.rules import NonconformityError, NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import CALLING, TOOL, calls_in, connect
from protocol.conformance.steps import streamed
from protocol.errors import ProtocolError

checks = Checks()

_BOTH = (Way.HTTP, Way.CHAINED)

_SCHEMA: Event = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "is_hourly": {"type": "boolean"},
        "units": {
            "type": "array",
            "items": {"type": "string", "enum": ["mm", "degrees"]},
            "minItems": 1,
            "maxItems": 2,
        },
        "place": {
            "type": "object",
            "properties": {"is_indoors": {"type": "boolean"}},
            "required": ["is_indoors"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "is_hourly", "units", "place"],
    "additionalProperties": False,
}
"""Bounded, so that the smallest model comes to an end."""

_STRICT_TOOL: Event = {
    "type": "function",
    "name": "get_forecast",
    "description": "Weather forecast",
    "parameters": _SCHEMA,
    "strict": True,
}
_QUESTION = "What will the weather be like in Oslo tomorrow?"
_FORMAT: Event = {"type": "json_schema", "name": "forecast", "schema": _SCHEMA, "strict": True}
_NUM_ALTERNATIVES = 2
_ACKNOWLEDGEMENTS = ("response.inject.created", "response.inject.failed")


def _custom(text_format: Event) -> Event:
    """Return the members of a create that ends in one call of a custom tool."""
    tool = {"type": "custom", "name": "run", "description": "Runs a command"}
    choice = {"type": "custom", "name": "run"}
    tools = [TOOL, tool | {"format": text_format}]
    return {"input": "Run it, please.", "tools": tools, "tool_choice": choice}


def _grammar(syntax: str, definition: str) -> Event:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


_REGEX = r"[a-z]{3}-[0-9]{2}"
_LARK = 'start: "turn " WAY\nWAY: "left" | "right"'
_LARK_AS_REGEX = r"turn (left|right)"


# --- Arguments -----------------------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.STRICT_ARGUMENTS, requests=1)
def strict_arguments_match_their_schema(target: Target, way: Way) -> Scenario:
    """The arguments of a strict function match its schema."""
    events = yield from streamed(
        target, way, **(CALLING | {"input": _QUESTION, "tools": [_STRICT_TOOL]})
    )

    calls = calls_in(events)
    expect(bool(calls), "a call was required, and none was made")
    _raise_if_torn(calls[-1])
    for call in calls:
        _expect_match(call["arguments"])


# --- Free-form input -----------------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.CUSTOM_CALL_EVENTS, requests=1)
def custom_call_is_told_in_order(target: Target, way: Way) -> Scenario:
    """A custom tool that is named is called, in the order of the grammar."""
    events = yield from streamed(target, way, **(CALLING | _custom({"type": "text"})))

    kinds = [(call["type"], call["name"]) for call in calls_in(events)]
    expect(kinds == [("custom_tool_call", "run")], f"the calls are {kinds}")


@checks.over(*_BOTH, rule=Rule.CUSTOM_GRAMMAR, requests=1)
def custom_input_matches_its_regex(target: Target, way: Way) -> Scenario:
    """The input of a custom tool with a regular expression matches that from end to end."""
    events = yield from streamed(target, way, **(CALLING | _custom(_grammar("regex", _REGEX))))

    _expect_inputs(events, _REGEX)


@checks.over(*_BOTH, rule=Rule.CUSTOM_GRAMMAR, requests=1)
def custom_input_matches_its_lark_grammar(target: Target, way: Way) -> Scenario:
    """The input of a custom tool with a Lark grammar is a sentence of that."""
    events = yield from streamed(target, way, **(CALLING | _custom(_grammar("lark", _LARK))))

    _expect_inputs(events, _LARK_AS_REGEX)


def _expect_inputs(events: list[Event], pattern: str) -> None:
    calls = calls_in(events)
    expect(bool(calls), "a call was required, and none was made")
    _raise_if_torn(calls[-1])
    for call in calls:
        is_match = re.fullmatch(pattern, call["input"]) is not None
        expect(is_match, f"the input is {call['input']!r}, and has to match {pattern}")


@checks.over(Way.CHAINED, Way.APPEND, Way.INJECT, rule=Rule.CALLS_ARE_ANSWERED, requests=2)
def output_answers_a_custom_call(target: Target, way: Way) -> Scenario:
    """A custom call is answered by a `custom_tool_call_output`, in each dialect in its own way."""
    socket = yield from connect(target, way)
    asked = _custom(_grammar("regex", _REGEX))
    called = yield from socket.call(**asked)
    _raise_if_torn(called.calls[-1])
    match way:
        case Way.APPEND:
            events = yield from socket.append(*called.outputs())
        case Way.INJECT:
            yield from socket.send_inject(called.response_id, *called.outputs())
            answer = (yield from socket.up_to(*_ACKNOWLEDGEMENTS))[-1]["type"]
            expect(answer == _ACKNOWLEDGEMENTS[0], f"the output is answered with {answer}")
            events = yield from socket.segment()
        case _:
            follow = {"tools": asked["tools"], "tool_choice": "none"}
            events = yield from socket.follow(called.response, called.outputs(), **follow)

    kinds = {call["type"] for call in called.calls}
    expect(kinds == {"custom_tool_call"}, f"the calls are {kinds}")
    expect(events[-1]["type"] != "response.failed", "the response failed")


# --- Text ----------------------------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.STRUCTURED_TEXT, requests=1)
def answer_matches_its_schema(target: Target, way: Way) -> Scenario:
    """With a strict `json_schema` the text matches it, and the response repeats the format."""
    events = yield from streamed(target, way, input=_QUESTION, text={"format": _FORMAT})

    response = events[-1]["response"]
    _expect_match(_whole_text(response))
    told = {name: response["text"]["format"].get(name) for name in _FORMAT}
    expect(told == _FORMAT, f"the format that is repeated is {told}")


@checks.over(*_BOTH, rule=Rule.JSON_TEXT, requests=1)
def answer_is_a_json_object(target: Target, way: Way) -> Scenario:
    """With `json_object` the text is one JSON object."""
    asked = "What is the weather in Oslo? Answer in JSON, with one member."
    events = yield from streamed(target, way, input=asked, text={"format": {"type": "json_object"}})

    begins = _text(events[-1]["response"]).lstrip()[:1]
    expect(begins in ("", "{"), f"the text begins with {begins!r}")
    _parsed(_whole_text(events[-1]["response"]))


@checks.over(Way.CHAINED, rule=Rule.FORMAT_BINDS_TEXT, requests=2)
def schema_of_the_text_forbids_no_call(target: Target, way: Way) -> Scenario:
    """With tools and a `json_schema`, calls are made as without it, and the answer matches it."""
    socket = yield from connect(target, way)
    asked = {"tools": [TOOL], "text": {"format": _FORMAT}}
    called = yield from socket.call(**asked)
    _raise_if_torn(called.calls[-1])
    follow = asked | {"tool_choice": "none"}
    events = yield from socket.follow(called.response, called.outputs(), **follow)

    _expect_match(_whole_text(events[-1]["response"]))


# --- Log probabilities ---------------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.LOGPROBS, requests=1)
def tokens_have_log_probabilities(target: Target, way: Way) -> Scenario:
    """The tokens of a text have log probabilities, with the alternatives that are asked for."""
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": _NUM_ALTERNATIVES}
    response = (yield from streamed(target, way, **asked))[-1]["response"]

    parts = _parts(response)
    for part in parts:
        entries = part.get("logprobs") or []
        expect(bool(entries) or not part["text"], f"a part without log probabilities: {part}")
        told = b"".join(map(_bytes, entries)).decode(errors="replace")
        is_it = _legible(told) == _legible(part["text"])
        expect(is_it, f"the tokens are {told!r} of {part['text']!r}")
        for entry in entries:
            _expect_likely(entry)
    expect(bool(parts), "no text was told")


def _bytes(entry: Event) -> bytes:
    """Return what a token is: its bytes where they are told, as it may be half a character."""
    found = entry.get("bytes")
    if found is None:
        return str(entry["token"]).encode()
    expect(isinstance(found, list), f"expected bytes as numbers, or null, not {found!r}")
    return bytes(found)


def _legible(text: str) -> str:
    """Leave out what stands for bytes that are no character: how often, decoders do not agree."""
    return text.replace("\ufffd", "")


def _expect_likely(entry: Event) -> None:
    others = entry["top_logprobs"]
    is_number = all(_is_logprob(other["logprob"]) for other in (entry, *others))
    expect(is_number, f"no log probability: {entry}")
    # The reference lets there be fewer in rare cases.
    is_right = 0 < len(others) <= _NUM_ALTERNATIVES
    expect(is_right, f"{len(others)} alternatives, where {_NUM_ALTERNATIVES} were asked for")


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and value <= 0


# --- Reading them --------------------------------------------------------------------------------


def _raise_if_torn(item: Event) -> None:
    """Judge only what came to an end: a small model need not, within the limit.

    Raises:
        NotSupportedError: it did not.
    """
    if item.get("status") == "incomplete":
        raise NotSupportedError("the model came to no end within the limit")


def _parts(response: Event) -> list[Event]:
    """Return the parts of messages that are text."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    parts = [part for message in messages for part in message["content"]]
    return [part for part in parts if part["type"] == "output_text"]


def _text(response: Event) -> str:
    return "".join(part["text"] for part in _parts(response))


def _whole_text(response: Event) -> str:
    if response["output"]:
        _raise_if_torn(response["output"][-1])
    return _text(response)


def _parsed(text: str) -> Event:
    try:
        return decode_object(text)
    except ProtocolError as error:
        raise NonconformityError(f"{error.message}: {text!r}") from None


def _expect_match(text: str) -> None:
    found = mismatch(_parsed(text), _SCHEMA)
    expect(found is None, f"{found} in {text}")
