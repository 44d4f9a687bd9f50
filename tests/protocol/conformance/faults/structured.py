"""Faults in giving output the form that it has to have."""

from collections.abc import Sequence

import msgspec

from protocol import errors
from protocol.client_events import TextFormatKind
from protocol.codec import decode_object, encode
from protocol.conformance.rules import Rule
from protocol.items import CallOutput, CustomToolCall, InputItem
from protocol.output_items import Logprob, OutputCustomToolCall
from protocol.tools import CallableTool, CustomTool, FunctionTool, callable_tools
from tests.protocol.conformance.faults.fault import Faults, missing, wrong
from tests.protocol.conformance.model_server import ModelServer, Run

faults = Faults()

CUSTOM = "custom-call-is-told-in-order"
GRAMMARS = "custom-input-matches-its-*"
ARGUMENTS = "strict-arguments-match-their-schema"
TEXT = "answer-matches-its-schema"
OBJECT = "answer-is-a-json-object"
CALL_AND_TEXT = "schema-of-the-text-forbids-no-call"
CUSTOM_OUTPUT = "output-answers-a-custom-call"
LOGPROBS = "tokens-have-log-probabilities"


# --- Arguments and free-form input ---------------------------------------------------------------


@faults.doing(Rule.STRICT_ARGUMENTS, ARGUMENTS)
class LeavesMembersOut(ModelServer):
    """Members that a strict schema requires are left out."""

    def arguments(self, tool: CallableTool) -> str:
        members = list(decode_object(super().arguments(tool)).items())
        return encode(dict(members[:-1])).decode()


@faults.doing(Rule.STRICT_ARGUMENTS, ARGUMENTS)
class InventsMembers(ModelServer):
    """A strict call has a member more than its schema."""

    def arguments(self, tool: CallableTool) -> str:
        return encode(decode_object(super().arguments(tool)) | {"zip": "0150"}).decode()


@faults.doing(Rule.STRICT_ARGUMENTS, ARGUMENTS)
class TearsArguments(ModelServer):
    """The arguments of a call that is whole are no JSON."""

    def arguments(self, tool: CallableTool) -> str:
        return super().arguments(tool)[:-1]


@faults.doing(Rule.CUSTOM_CALL_EVENTS, CUSTOM)
class CallsAFunction(ModelServer):
    """A function is called, where a custom tool was named."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        tools = callable_tools(run.params.tools) if super().tools_to_call(run) else []
        return [tool for tool in tools if not isinstance(tool, CustomTool)]


faults.telling(
    "a custom call without the end of its input",
    Rule.CUSTOM_CALL_EVENTS,
    CUSTOM,
    missing("custom_tool_call_input.done"),
)
faults.telling(
    "input of a custom call that is told otherwise",
    Rule.DELTAS_ADD_UP,
    CUSTOM,
    wrong("custom_tool_call_input.done", "input", value="ls"),
)


@faults.doing(Rule.CUSTOM_GRAMMAR, GRAMMARS)
class WritesFreely(ModelServer):
    """The grammar of a custom tool binds nobody."""

    def custom_input(self, tool: CustomTool) -> str:
        return "ls -l"


@faults.doing(Rule.CUSTOM_GRAMMAR, GRAMMARS)
class WritesOn(ModelServer):
    """After a sentence of the grammar more is written."""

    def custom_input(self, tool: CustomTool) -> str:
        return super().custom_input(tool) + "!"


@faults.doing(Rule.CALLS_ARE_ANSWERED, CUSTOM_OUTPUT)
class ForgetsCustomCalls(ModelServer):
    """Outputs of custom calls are orphans."""

    def check_calls(self, context: Sequence[InputItem]) -> None:
        super().check_calls([item for item in context if not isinstance(item, CustomToolCall)])

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        for item in run.stream.output:
            if isinstance(item, OutputCustomToolCall):
                raise errors.orphan_output(item.call_id)
        super().append(run, items)


@faults.doing(Rule.CALLS_ARE_ANSWERED, CUSTOM_OUTPUT)
class AnswersWithFunctions(ModelServer):
    """A custom tool is declared in vain: a function is called."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        tools = callable_tools(run.params.tools) if super().tools_to_call(run) else []
        return [tool for tool in tools if isinstance(tool, FunctionTool)]


# --- Text ----------------------------------------------------------------------------------------


@faults.doing(Rule.STRUCTURED_TEXT, TEXT)
class IgnoresFormats(ModelServer):
    """Text is text, whatever format it has to have."""

    def text(self, run: Run) -> list[str]:
        return self.words(run)


@faults.doing(Rule.JSON_TEXT, OBJECT)
class WritesBesideJson(IgnoresFormats):
    """An object in JSON is announced in words."""

    def text(self, run: Run) -> list[str]:
        return ["Here ", "it is: ", *ModelServer.text(self, run)]


@faults.doing(Rule.JSON_TEXT, OBJECT)
class WritesArrays(ModelServer):
    """The text is an array, where it has to be an object."""

    def text(self, run: Run) -> list[str]:
        return ["[", *super().text(run), "]"]


@faults.doing(Rule.JSON_TEXT, OBJECT)
class WritesTwoObjects(ModelServer):
    """The text is two objects, one after the other."""

    def text(self, run: Run) -> list[str]:
        return super().text(run) * 2


@faults.doing(Rule.STRUCTURED_TEXT, TEXT)
class AnyObjectWillDo(ModelServer):
    """The text is an object, of no schema."""

    def text(self, run: Run) -> list[str]:
        return ['{"says": ', '"hello"}']


faults.telling(
    "a format that is not repeated",
    Rule.STRUCTURED_TEXT,
    TEXT,
    wrong("completed", "response", "text", value={"format": {"type": "text"}}),
)


@faults.doing(Rule.FORMAT_BINDS_TEXT, CALL_AND_TEXT)
class NoCallsWithFormats(ModelServer):
    """With a text format no tool is called."""

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        is_text = run.params.text_format.kind is TextFormatKind.TEXT
        return super().tools_to_call(run) if is_text else []


@faults.doing(Rule.FORMAT_BINDS_TEXT, CALL_AND_TEXT)
class ForgetsFormatsAfterCalls(ModelServer):
    """After a call the text format binds nobody."""

    def text(self, run: Run) -> list[str]:
        has_outputs = any(isinstance(item, CallOutput) for item in run.context)
        return self.words(run) if has_outputs else super().text(run)


# --- Log probabilities ---------------------------------------------------------------------------


@faults.doing(Rule.LOGPROBS, LOGPROBS)
class KeepsLogprobsToItself(ModelServer):
    """Log probabilities that are asked for are not told."""

    def logprobs(self, run: Run, token: str) -> tuple[Logprob, ...]:
        return ()


@faults.doing(Rule.LOGPROBS, LOGPROBS)
class TrimsTokens(ModelServer):
    """The tokens are told without their white space."""

    def logprobs(self, run: Run, token: str) -> tuple[Logprob, ...]:
        return super().logprobs(run, token.strip())


@faults.doing(Rule.LOGPROBS, LOGPROBS)
class NoAlternatives(ModelServer):
    """Tokens have no alternatives, though some are asked for."""

    def logprobs(self, run: Run, token: str) -> tuple[Logprob, ...]:
        told = super().logprobs(run, token)
        return tuple(msgspec.structs.replace(entry, top_logprobs=()) for entry in told)


@faults.doing(Rule.LOGPROBS, LOGPROBS)
class AllAlternatives(ModelServer):
    """Tokens have more alternatives than are asked for."""

    def logprobs(self, run: Run, token: str) -> tuple[Logprob, ...]:
        told = super().logprobs(run, token)
        return tuple(
            msgspec.structs.replace(entry, top_logprobs=entry.top_logprobs * 2) for entry in told
        )


@faults.doing(Rule.LOGPROBS, LOGPROBS)
class TellsProbabilities(ModelServer):
    """Told are probabilities, not their logarithms."""

    def logprobs(self, run: Run, token: str) -> tuple[Logprob, ...]:
        told = super().logprobs(run, token)
        return tuple(msgspec.structs.replace(entry, logprob=0.37) for entry in told)
