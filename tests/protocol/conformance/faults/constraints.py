"""Faults in keeping constraints, and in what is tolerated."""

from collections.abc import Generator
from typing import Any

from protocol import errors
from protocol.client_events import CreateParams
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.items import Message, UnknownItem
from protocol.server_events import ServerEvent
from protocol.tools import CallableTool, OpaqueTool, callable_tools
from tests.protocol.conformance.faults.fault import Faults, missing, wrong
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run

faults = Faults()

CALL = "call-is-told-in-order"
LIMIT = "limit-ends-a-*"


@faults.doing(Rule.OUTPUT_LIMIT, LIMIT)
class Limitless(ModelServer):
    """The limit is not kept."""

    def limited(self, run: Run, tokens: list[str]) -> list[str]:
        return tokens


@faults.doing(Rule.OUTPUT_LIMIT, LIMIT)
class LimitsByHalf(ModelServer):
    """The limit is counted in something else than tokens."""

    def limited(self, run: Run, tokens: list[str]) -> list[str]:
        num_tokens = len(super().limited(run, tokens))
        return tokens[: 2 * num_tokens]


faults.telling(
    "a reason that is misspelled",
    Rule.TERMINAL_STATUS,
    LIMIT,
    wrong("incomplete", "response", "incomplete_details", "reason", value="max_tokens"),
)
faults.telling("no end at the limit", Rule.ONE_TERMINAL, LIMIT, missing("incomplete"))


@faults.doing(Rule.TOOL_CHOICE, "none-makes-no-call")
class AlwaysCalls(ModelServer):
    """The first tool is called, whatever the choice."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        return callable_tools(run.params.tools)[:1]


@faults.doing(Rule.TOOL_CHOICE, "named-tool-is-called")
class CallsTheFirst(AlwaysCalls):
    """Another tool is called than was named."""


@faults.doing(Rule.TOOL_CHOICE, "named-tool-is-called")
class EmptyArguments(ModelServer):
    """Arguments do not match their schema."""

    def arguments(self, tool: CallableTool) -> str:
        return "{}    "


@faults.doing(Rule.CALL_EVENTS, CALL)
class NeverCalls(ModelServer):
    """A call that is required is not made."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        return []


@faults.doing(Rule.PARALLEL_TOOL_CALLS, "one-call-at-most")
class CallsTwice(ModelServer):
    """Two calls are made, where one is allowed."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        return super().tools_to_call(run) * 2


@faults.doing(Rule.JUNK_TOLERANCE, "tools-of-other-kinds-are-accepted")
class FunctionsOnly(ModelServer):
    """Tools that are no functions are refused."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        params = super().parse(body, transport)
        if any(isinstance(tool, OpaqueTool) for tool in params.tools):
            raise errors.invalid_value("tools", "expected functions")
        return params


@faults.doing(Rule.JUNK_TOLERANCE, "members-of-codex-are-accepted")
class KnownMembersOnly(ModelServer):
    """Members that are not in the reference are refused."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        if "client_metadata" in body:
            raise errors.invalid_value("client_metadata", "expected no such member")
        return super().parse(body, transport)


# --- The limit -----------------------------------------------------------------------------------


@faults.doing(Rule.OUTPUT_LIMIT, "tiny-limits-are-kept")
class RoundsLimitsUp(ModelServer):
    """A limit of less than 16 tokens counts as 16."""

    def limited(self, run: Run, tokens: list[str]) -> list[str]:
        return tokens[: max(16, run.params.max_output_tokens or len(tokens))]


@faults.doing(Rule.OUTPUT_LIMIT, "tiny-limits-are-kept")
class CompletesAtLimits(ModelServer):
    """A response that ends at its limit is completed."""

    def write(self, run: Run) -> Generator[ServerEvent, None, str]:
        yield from super().write(run)
        return "stop"


@faults.doing(Rule.CONTINUES_FROM_PARENT, "torn-response-is-continued")
class ForgetsTheTorn(ModelServer):
    """What is incomplete cannot be continued."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        run = super().parent(response_id, connection)
        if run is not None and run.stream.response.status == "incomplete":
            raise errors.previous_response_not_found(run.id)
        return run


@faults.doing(Rule.CONTINUES_FROM_PARENT, "tiny-responses-are-continued")
class ForgetsTheTiny(ModelServer):
    """What is torn before it says anything cannot be continued."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        run = super().parent(response_id, connection)
        if run is not None and (run.params.max_output_tokens or 16) < 16:
            raise errors.previous_response_not_found(run.id)
        return run


# --- The tools that may be called ----------------------------------------------------------------


@faults.doing(Rule.TOOL_CHOICE, "*tool-*allowed-is-*called")
class AllowsEverything(ModelServer):
    """A tool is called that is not among those that are allowed."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        return callable_tools(run.params.tools)[:1]


@faults.doing(Rule.TOOL_CHOICE, "only-an-allowed-tool-is-called")
class AllowedIsNotRequired(ModelServer):
    """None of the allowed tools is called, though one is required."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        is_any = run.params.tool_choice.names is None
        return super().tools_to_call(run) if is_any else []


faults.telling(
    "tools that are told as far as they are allowed",
    Rule.TOOL_CHOICE,
    "only-an-allowed-tool-is-called",
    wrong("completed", "response", "tools", value=[{"type": "function", "name": "get_weather"}]),
)


@faults.doing(Rule.CACHED_TOKENS, "allowed-tools-keep-the-cache")
class RendersAllowedToolsOnly(ModelServer):
    """The model reads only those tools that are allowed, so that half is prefilled again."""

    def shares_prefix(self, parent: Run, params: CreateParams) -> bool:
        self.is_other_list = parent.params.tool_choice.names != params.tool_choice.names
        return super().shares_prefix(parent, params)

    def num_cached(self, parent: Run) -> int:
        return super().num_cached(parent) // (2 if self.is_other_list else 1)


# --- What is of one response alone ---------------------------------------------------------------


@faults.doing(Rule.INSTRUCTIONS_ARE_OWN, "instructions-are-not-inherited")
class InheritsInstructions(ModelServer):
    """A continuation without instructions has those of its parent."""

    latest: Any = None

    def parse(self, body: Event, transport: Any) -> CreateParams:
        self.latest = body.get("instructions", self.latest)
        return super().parse(body | {"instructions": self.latest}, transport)


@faults.doing(Rule.INSTRUCTIONS_ARE_OWN, "instructions-are-not-inherited")
class ReadsInstructionsAgain(ModelServer):
    """Instructions of the parent are read again, and not told."""

    latest: str | None = None

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if run.params.instructions is None and self.latest is not None:
            run.context = [Message("system", self.latest), *run.context]
        self.latest = run.params.instructions
        return run


@faults.doing(Rule.TOOLS_ARE_OWN, "tools-are-not-inherited")
class InheritsTools(ModelServer):
    """A continuation without tools has those of its parent."""

    latest: Any = None

    def parse(self, body: Event, transport: Any) -> CreateParams:
        self.latest = body.get("tools", self.latest)
        return super().parse(body | {"tools": self.latest}, transport)


@faults.doing(Rule.TOOLS_ARE_OWN, "tools-are-not-inherited")
class CallsToolsOfTheParent(ModelServer):
    """A tool of the parent is called, though it is told that there is none."""

    latest: list[CallableTool]

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        if run.params.tools:
            self.latest = callable_tools(run.params.tools)
            return super().tools_to_call(run)
        return self.latest


# --- What constrains nothing ---------------------------------------------------------------------


@faults.doing(Rule.JUNK_TOLERANCE, "unknown-items-are-accepted")
class KnownItemsOnly(ModelServer):
    """An item of a type that is not known is refused."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        params = super().parse(body, transport)
        if any(isinstance(item, UnknownItem) for item in params.input):
            raise errors.invalid_value("input", "expected items of known types")
        return params


@faults.doing(Rule.JUNK_TOLERANCE, "ids-of-items-are-free")
class OwnIdsOnly(ModelServer):
    """An item with an id that was not made here is refused."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        params = super().parse(body, transport)
        for i, item in enumerate(params.input_json):
            if "id" in item:
                raise errors.item_not_found(item["id"], f"input[{i}].id")
        return params


@faults.doing(Rule.JUNK_TOLERANCE, "reasoning-may-be-asked-for-in-vain")
class IncludesNothing(ModelServer):
    """What may be included is refused where there is none."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        params = super().parse(body, transport)
        if params.include:
            raise errors.invalid_value("include", "expected nothing")
        return params


@faults.doing(Rule.CACHED_TOKENS, "client-metadata-keeps-the-cache")
class ReadsMetadata(ModelServer):
    """Half is prefilled again where the metadata of the client is not the same."""

    metadata: Any = None

    def parse(self, body: Event, transport: Any) -> CreateParams:
        self.is_same = body.get("client_metadata") == self.metadata
        self.metadata = body.get("client_metadata")
        return super().parse(body, transport)

    def num_cached(self, parent: Run) -> int:
        return super().num_cached(parent) // (1 if self.is_same else 2)
