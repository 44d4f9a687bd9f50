"""Faults that the compliance suite of Open Responses would find."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from protocol import errors
from protocol.client_events import CompactParams, CreateParams
from protocol.codec import decode_object, encode
from protocol.conformance.actions import Answer, Request
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.dialect import Dialect
from protocol.response import CompactionResource
from protocol.server_events import ServerEvent
from tests.protocol.conformance.faults.chaining import (
    EvictsNothing,
    KeepsNothing,
    OtherCode,
    SpeaksAtWarmUps,
)
from tests.protocol.conformance.faults.constraints import NeverCalls
from tests.protocol.conformance.faults.fault import Faults, missing, without, wrong
from tests.protocol.conformance.faults.over_http import StoresEverything
from tests.protocol.conformance.model_server import MODEL, ModelServer, Run

faults = Faults()


# --- The resource --------------------------------------------------------------------------------


@faults.doing(Rule.OPEN_RESPONSE_MEMBERS, "basic-response")
class LacksATier(ModelServer):
    """A response has no service tier."""

    def resource(self, response: Event) -> Event:
        return {name: value for name, value in response.items() if name != "service_tier"}


@faults.doing(Rule.OPEN_RESPONSE_MEMBERS, "basic-response")
class LacksAFormat(ModelServer):
    """The text of a response is of no format."""

    def resource(self, response: Event) -> Event:
        return response | {"text": {}}


faults.telling(
    "a truncation that is null",
    Rule.OPEN_RESPONSE_MEMBERS,
    "streaming-response",
    wrong("in_progress", "response", "truncation", value=None),
)
faults.telling(
    "a temperature in words",
    Rule.OPEN_RESPONSE_MEMBERS,
    "websocket-sequential-responses",
    wrong("completed", "response", "temperature", value="warm"),
)
faults.telling(
    "usage without details",
    Rule.OPEN_RESPONSE_MEMBERS,
    "websocket-response",
    without("completed", "response", "usage", "input_tokens_details"),
)
faults.telling(
    "usage that counts nothing cached",
    Rule.OPEN_RESPONSE_MEMBERS,
    "websocket-response",
    without("completed", "response", "usage", "input_tokens_details", "cached_tokens"),
)
faults.telling(
    "functions without strict",
    Rule.OPEN_RESPONSE_MEMBERS,
    "tool-calling*",
    without("completed", "response", "tools", 0, "strict"),
)


# --- Answers -------------------------------------------------------------------------------------


@faults.doing(Rule.ANSWERS, "basic-response")
class SaysNothing(ModelServer):
    """A response is completed without output."""

    def write(self, run: Run) -> Generator[ServerEvent, None, str]:
        yield from ()
        return "stop"


class Fails(ModelServer):
    """Every response fails."""

    def speak(
        self, run: Run, first: Iterable[ServerEvent], dialect: Dialect
    ) -> Iterator[ServerEvent]:
        yield from first
        yield from run.stream.fail("server_error", "oops")


@faults.doing(Rule.ANSWERS, "streaming-response")
class FailsInStreams(Fails):
    """Every stream ends in a failure."""


@faults.doing(Rule.ANSWERS, "websocket-response")
class FailsOverWebSocket(Fails):
    """Every create over WebSocket fails."""


@faults.doing(Rule.ANSWERS, "websocket-sequential-responses")
class FailsTheSecondTime(Fails):
    """The second response of a connection fails."""

    def speak(
        self, run: Run, first: Iterable[ServerEvent], dialect: Dialect
    ) -> Iterator[ServerEvent]:
        whole = ModelServer if run.id == "resp_1" else Fails
        return whole.speak(self, run, first, dialect)


# --- Input ---------------------------------------------------------------------------------------


@faults.doing(Rule.INPUT_MESSAGES, "system-prompt")
class KnowsNoSystem(ModelServer):
    """Only users and assistants may speak."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        if any(item.get("role") == "system" for item in _items(body)):
            raise errors.invalid_value("input", "expected messages of users and assistants")
        return super().parse(body, transport)


@faults.doing(Rule.INPUT_MESSAGES, "multi-turn")
class KnowsNoHistory(ModelServer):
    """Only users may speak."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        if any(item.get("role") == "assistant" for item in _items(body)):
            raise errors.invalid_value("input", "expected messages of users")
        return super().parse(body, transport)


@faults.doing(Rule.INPUT_MESSAGES, "assistant-phase")
class KnowsNoPhase(ModelServer):
    """A message may have no phase."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        if any("phase" in item for item in _items(body)):
            raise errors.invalid_value("input", "expected messages without phase")
        return super().parse(body, transport)


@faults.doing(Rule.IMAGES, "image-input")
class BreaksAtImages(ModelServer):
    """Images break the server."""

    def seen(self, body: Event) -> Event:
        if "input_image" in str(body):
            raise errors.server_error("oops")
        return super().seen(body)


def _items(body: Event) -> list[Event]:
    found = body.get("input")
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


# --- Calls ---------------------------------------------------------------------------------------


@faults.doing(Rule.TOOL_CHOICE, "tool-calling")
class TalksAboutTools(NeverCalls):
    """Instead of a call there is text."""


@faults.doing(Rule.CALL_EVENTS, "tool-calling-streaming")
class TalksAboutToolsInStreams(NeverCalls):
    """Instead of a call a stream has text."""


faults.telling(
    "arguments that are never done",
    Rule.CALL_EVENTS,
    "tool-calling-streaming",
    missing("function_call_arguments.done"),
)


# --- Compaction ----------------------------------------------------------------------------------


@faults.doing(Rule.COMPACTION, "compact-response")
class IsAResponse(ModelServer):
    """What is compacted is called a response."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        if not request.path.endswith("/compact"):
            return found
        return replace(found, body=encode(decode_object(found.body) | {"object": "response"}))


@faults.doing(Rule.COMPACTION, "compact-response")
class CompactsToNothing(ModelServer):
    """A conversation is compacted to nothing."""

    def compacted(self, params: CompactParams) -> CompactionResource:
        return msgspec.structs.replace(super().compacted(params), output=[])


@faults.doing(Rule.COMPACTION, "compact-response")
class CompactsToMessages(ModelServer):
    """A conversation is compacted to what its user said."""

    def compacted(self, params: CompactParams) -> CompactionResource:
        said: Event = {"id": "msg_1", "type": "message", "role": "user", "status": "completed"}
        whole = super().compacted(params)
        return msgspec.structs.replace(whole, output=[said | {"content": []}])


@faults.doing(Rule.COMPACTION, "compact-missing-model")
class CompactsWithAnyModel(ModelServer):
    """A model is not needed to compact."""

    def parse_compact(self, body: Event) -> CompactParams:
        return super().parse_compact({"model": MODEL, **body})


@faults.doing(Rule.COMPACTION, "websocket-compact-new-chain")
class KnowsNoCompaction(ModelServer):
    """What was compacted is not accepted back."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        if any(item.get("type") == "compaction" for item in _items(body)):
            raise errors.invalid_value("input", "expected messages")
        return super().parse(body, transport)


# --- Continuing ----------------------------------------------------------------------------------


@faults.doing(Rule.CONTINUES_FROM_PARENT, "websocket-continuation")
class ForgetsTheWord(KeepsNothing):
    """What is not stored cannot be followed."""


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "websocket-reconnect-store-false-recovery")
class RemembersAfterReconnect(StoresEverything):
    """What is not stored is known to connections that come later."""


@faults.doing(Rule.WARM_UP, "websocket-generate-false")
class AnswersWarmUps(SpeaksAtWarmUps):
    """A warm-up has output."""


@faults.doing(Rule.PARENT_NOT_FOUND, "websocket-previous-response-not-found")
class InvalidParent(OtherCode):
    """A parent that is not there is no valid value."""


@faults.doing(Rule.FAILED_CONTINUATION_EVICTS, "websocket-failed-continuation-evicts-cache")
class KeepsWhatFailed(EvictsNothing):
    """A failed continuation leaves its parent where it was."""
