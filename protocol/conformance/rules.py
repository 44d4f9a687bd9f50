"""What has to hold, in a sentence each, and who says so.

Three sources count: the OpenAI documentation, the specification of Open Responses, and what clients
were seen to need where both are silent, as they are on the prototype with ``response.append``.
"""

from enum import Enum

_STREAMING = "OpenAI reference, Streaming events"
_FRAMES = "OpenAI reference, WebSocket events"
_SOCKET = "OpenAI guide, WebSocket mode"
_STEERING = "OpenAI guide, Mid-turn steering"
_AGENTS = "OpenAI guide, Multi-agent"
_ERRORS = "OpenAI guide, Error codes"
_RESOURCE = "OpenAI reference, The response object"
_CREATE = "OpenAI reference, Create a model response"
_OPEN = "Open Responses 2026-04-24"
_CODEX = "Codex 0.87 to 0.107, its WebSocket client"


class Rule(Enum):
    """A rule: ``text`` says what must hold, ``source`` where that is said."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source

    @property
    def id(self) -> str:
        """The name as it is printed."""
        return self.name.lower().replace("_", "-")

    # --- What an event holds ---

    FRAME_IS_JSON = ("an event is one JSON object, in one text frame", _FRAMES)
    KNOWN_EVENT = (
        "an event is of a type that the reference lists, or of an extension's, named `slug:name`",
        f"{_STREAMING}; {_OPEN}, Extensions",
    )
    EVENT_MEMBERS = ("an event has the members of its type", f"{_STREAMING}; {_FRAMES}")
    ITEM_MEMBERS = ("an item has the members of its type", f"{_RESOURCE}, output")
    RESPONSE_MEMBERS = ("a response has the members that clients read", _RESOURCE)
    OPEN_RESPONSE_MEMBERS = (
        "a response has all 31 members, null where that is allowed",
        f"{_OPEN}, ResponseResource",
    )
    ERROR_FRAME = (
        "an error frame has a `status` and an `error` with type and message",
        f"{_FRAMES}, error",
    )
    ERROR_BODY = (
        "an HTTP error has `error` with message, type, param and code",
        "OpenAI guide, Error codes",
    )
    SSE_FRAMES = (
        "an event has one `event` line equal to its type, one `data` line and no `id`; "
        "one `[DONE]`, with nothing but its `data` line, follows the terminal event",
        f"{_OPEN}, Streaming over HTTP",
    )

    # --- The order of a stream ---

    SEQUENCE_NUMBERS = ("sequence numbers begin at 0 and rise by 1 within a response", _STREAMING)
    LIFECYCLE_BEGINS = (
        "`response.created` comes first and `response.in_progress` second, both with the whole "
        "response in progress, without output and usage",
        f"{_STREAMING}; {_OPEN}, Streaming",
    )
    ONE_RESPONSE_ID = ("all events of a response carry its id", _STREAMING)
    ITEMS_ARE_DENSE = ("`output_index` counts the items from 0 as they are added", _STREAMING)
    ITEMS_CLOSE = (
        "an item is added once, and done before its response ends; what is told is of such an item",
        _STREAMING,
    )
    ITEM_BEGINS_EMPTY = ("an added item is in progress and empty", _STREAMING)
    ITEM_IDENTITY = ("the events of an item carry its id, and ids never repeat", _STREAMING)
    MESSAGE_EVENTS = (
        "a message is told as part added, deltas, text done, part done, for each part",
        f"{_STREAMING}; {_OPEN}, Streaming",
    )
    CALL_EVENTS = ("a function call is told as deltas and `arguments.done`", _STREAMING)
    CUSTOM_CALL_EVENTS = ("a custom call is told as deltas and `input.done`", _STREAMING)
    REASONING_EVENTS = ("reasoning is told in the parts of a summary or of raw text", _STREAMING)
    COMPACTION_EVENTS = ("a compaction is told as `compacting`", _STREAMING)
    DELTAS_ADD_UP = ("what is done is the sum of its deltas", _STREAMING)
    ONE_TERMINAL = (
        "a response ends exactly once, as completed, incomplete or failed; nothing follows",
        f"{_STREAMING}; {_OPEN}, Streaming",
    )
    TERMINAL_OUTPUT = (
        "the output of a response is the list of the items that were done",
        f"{_STREAMING}; vllm-project/vllm#56285",
    )
    TERMINAL_STATUS = ("status, reason, error and usage agree with the terminal event", _RESOURCE)
    USAGE_ADDS_UP = ("`total_tokens` is the sum of input and output tokens", _RESOURCE)
    TORN_ITEM = (
        "only the last item of a response that ended early is incomplete",
        f"{_OPEN}, Items",
    )
    ONE_LANE = ("all events of a response are on the lane that its create named", _FRAMES)
    PADDING = ("`obfuscation` is in deltas only", _CREATE)
    SUSPENSION = (
        "`response.done` stands between items, and the response is still in progress",
        _CODEX,
    )
    ACKNOWLEDGEMENTS = (
        "steers and injects are acknowledged once, by the response they are sent to",
        f"{_FRAMES}; {_AGENTS}",
    )

    # --- HTTP ---

    ONE_PATH = (
        "one path takes POST and the WebSocket upgrade; a plain GET is refused with 4xx",
        f"{_SOCKET}; {_OPEN}, WebSocket",
    )
    REFUSED_BEFORE_STREAM = (
        "a request that is wrong is refused with 4xx before a stream begins",
        "OpenAI guide, Error codes; sgl-project/sglang#20027",
    )
    STREAM_IS_THE_RESPONSE = (
        "a streamed response ends as the same resource that is returned when it is not",
        _CREATE,
    )
    STORED_RESPONSES = ("a stored response can be retrieved, and deleted", f"{_RESOURCE}, Get")
    INPUT_ITEMS = (
        "the input of a stored response is listed in pages, the latest item first",
        "OpenAI reference, List input items",
    )
    BACKGROUND = (
        "a response in the background is returned at once, then polled or cancelled; "
        "others cannot be cancelled",
        "OpenAI guide, Background mode",
    )
    STREAM_RESUMES = (
        "the stream of a response in the background can be read on after any event",
        "OpenAI guide, Background mode; OpenAI reference, Get a model response",
    )
    INPUT_TOKENS = (
        "the input tokens that are counted are those of the response",
        "OpenAI reference, Get input token counts",
    )
    MODELS = ("the models are listed, and each is found by its id", "OpenAI reference, Models")
    CLIENT_MAY_LEAVE = (
        "a client that goes away ends its own response at most",
        "pipecat-ai/pipecat#4141; livekit/agents#6513",
    )

    # --- What is asked ---

    ANSWERS = (
        "what can be answered comes to a response that is completed, with output",
        f"{_OPEN}, Responses",
    )
    INPUT_MESSAGES = (
        "messages of the system, and earlier ones of users and of assistants with their phase, "
        "are accepted",
        f"{_OPEN}, Items; {_CREATE}, input",
    )
    IMAGES = (
        "an image in a message is accepted, and one that is none is refused",
        f"{_OPEN}, Items; OpenAI guide, Images",
    )
    COMPACTION = (
        "a conversation is compacted to items, among them a `compaction`, that begin another",
        f"{_OPEN}, Compact a response; OpenAI guide, Compaction",
    )

    # --- Refusals ---

    MODEL_NOT_FOUND = (
        "an unknown model is `model_not_found`, of the param `model`",
        f"{_ERRORS}; {_OPEN}, Errors",
    )
    WRONG_MEMBERS = (
        "a member that is missing, of a wrong type or out of its range is a 400, of its param",
        f"{_ERRORS}; {_OPEN}, Errors",
    )
    ERROR_TYPE = (
        "the type of a 400 is `invalid_request_error`, or `invalid_request`",
        f"{_ERRORS}; {_OPEN}, Errors",
    )
    CONTEXT_LENGTH = (
        "what is longer than the context window is `context_length_exceeded`, "
        "where truncation is disabled",
        f"{_CREATE}, truncation; {_OPEN}, Truncation",
    )
    CONVERSATIONS = (
        "a conversation that is not there is refused, not ignored, and excludes a parent",
        f"{_CREATE}, conversation",
    )
    API_KEY = (
        "without a key, or with a wrong one, requests and upgrades are refused with 401",
        f"{_ERRORS}; {_SOCKET}",
    )
    BACKGROUND_OVER_HTTP = (
        "`background` is refused over WebSocket",
        f"{_FRAMES}; {_OPEN}, WebSocket",
    )
    BINARY_FRAMES = (
        "a binary frame that is no JSON is a 400, or the server closes with 1003 or 1007",
        "RFC 6455, 5.6 and 7.4.1",
    )
    MESSAGE_SIZE = (
        "a message that is too long is a 400, or the server closes with 1009",
        "RFC 6455, 7.4.1; Soju06/codex-lb#1236",
    )

    # --- Continuing ---

    CONTINUES_FROM_PARENT = (
        "`previous_response_id` continues a response of the connection, stored or not",
        f"{_SOCKET}; {_OPEN}, WebSocket",
    )
    PARENT_NOT_FOUND = (
        "an unknown parent is `previous_response_not_found`, 400, of that param",
        f"{_SOCKET}; {_OPEN}, WebSocket",
    )
    STORE_FALSE_IS_LOCAL = (
        "a response that is not stored is unknown outside its connection",
        f"{_SOCKET}; {_OPEN}, WebSocket",
    )
    FAILED_CONTINUATION_EVICTS = (
        "a continuation that fails makes its lane forget the parent",
        f"{_SOCKET}; {_OPEN}, WebSocket",
    )
    CALLS_ARE_ANSWERED = (
        "an output without its call, or a call without its output, is a 400",
        "OpenAI guide, Function calling",
    )
    SOCKET_SURVIVES = (
        "an error of a request leaves the connection open and usable",
        f"{_SOCKET}; {_FRAMES}",
    )
    WARM_UP = (
        "`generate: false` gives a completed response without output, to continue from",
        _SOCKET,
    )
    CACHED_TOKENS = (
        "what continues a response does not prefill it again: `cached_tokens` says so",
        "OpenAI guide, Prompt caching",
    )

    # --- Lanes ---

    LANE_NAMES = ("a `stream_id` is 1 to 256 of `A-Za-z0-9_.-`", _SOCKET)
    LANE_ORDER = ("responses of one lane do not overlap and keep their order", _SOCKET)
    DEFAULT_LANE = ("events of the default lane carry no `stream_id`", _SOCKET)
    LANE_LIMIT = (
        "a connection has 32 named lanes, and one more is `websocket_stream_limit_reached`",
        _SOCKET,
    )
    LANE_ERRORS = (
        "an error says which lane it is of, unless the name of the lane is what is wrong",
        f"{_SOCKET}; {_FRAMES}, error",
    )
    LANES_OVERLAP = ("responses of different lanes do not wait for each other", _SOCKET)
    LANES_ARE_INDEPENDENT = (
        "what fails on one lane neither ends nor evicts what is of another",
        _SOCKET,
    )
    FORKS_ARE_PINNED = (
        "a fork that is in progress keeps its parent, whatever the lane of that does next",
        _SOCKET,
    )
    CREATES_QUEUE = ("creates beyond the 16 that may be in flight wait, and are answered", _SOCKET)

    # --- Steer ---

    STEER_IS_TAKEN_UP = (
        "an accepted steer is taken up by a successor, which the server creates by itself",
        f"{_STEERING}; {_FRAMES}, response.steer.accepted",
    )
    STEER_IS_PENDING = (
        "a steer of a response that stops at its calls waits for the create with their outputs",
        f"{_STEERING}; {_FRAMES}, response.steer.pending",
    )
    STEER_COMES_BACK = (
        "a steer that cannot be taken comes back, with a code that says why",
        f"{_STEERING}; {_FRAMES}, response.steer.failed",
    )

    # --- Constraints ---

    TOOL_CHOICE = ("`tool_choice` is a hard constraint", f"{_CREATE}; {_OPEN}, tool_choice")
    PARALLEL_TOOL_CALLS = ("`parallel_tool_calls: false` allows one call at most", _CREATE)
    OUTPUT_LIMIT = (
        "at `max_output_tokens` a response is incomplete, of that reason, and its parts are closed",
        _CREATE,
    )
    STRICT_ARGUMENTS = (
        "the arguments of a strict function match its schema",
        "OpenAI guide, Function calling, Strict mode",
    )
    CUSTOM_GRAMMAR = (
        "the input of a custom call matches the grammar of its tool",
        "OpenAI guide, Function calling, Context-free grammars",
    )
    STRUCTURED_TEXT = (
        "with a strict `json_schema`, the text is JSON that matches it",
        "OpenAI guide, Structured outputs",
    )
    JSON_TEXT = (
        "with `json_object`, the text is one JSON object",
        "OpenAI guide, Structured outputs, JSON mode",
    )
    FORMAT_BINDS_TEXT = (
        "a text format binds the text, and forbids no call",
        "Codex 0.98 to 0.171 and openai-agents 0.24.0, their requests with an output schema",
    )
    LOGPROBS = (
        "each token of the text has its log probability, and as many others as are asked for",
        f"{_CREATE}, include and top_logprobs",
    )
    INSTRUCTIONS_ARE_OWN = (
        "`instructions` are of their response alone: none come from its parent",
        f"{_CREATE}, instructions",
    )
    TOOLS_ARE_OWN = (
        "tools are of the response that names them: none come from its parent",
        "Codex 0.98 to 0.171 and openai-agents 0.24.0, which name them each time",
    )
    JUNK_TOLERANCE = (
        "members, tools and items that clients send and a server need not know are accepted",
        "Codex 0.171, openai-agents 0.24.0, their requests",
    )

    # --- Conversations, in every way ---

    SAME_CONTEXT = (
        "a conversation is the same to the model, whether it is told whole or in parts",
        f"{_SOCKET}; {_CREATE}",
    )
    ANY_OUTPUT = (
        "the output of a call is a string, which may be empty, or parts, all of which are read",
        f"{_CREATE}, input",
    )
    ECHOES = (
        "a call that a continuation repeats with its output is that of the parent",
        "Codex 0.99, its WebSocket client",
    )
    ABANDONMENT = (
        "a client that goes away while a call is open can connect again and begin anew",
        "Codex 0.87 to 0.171 and openai-agents 0.24.0, their WebSocket clients",
    )

    # --- Append ---

    APPEND_RESUMES = (
        "after `response.done` an append resumes the response, under the same id",
        _CODEX,
    )
    APPEND_IN_ANY_ORDER = ("outputs may be appended in any order", _CODEX)
    APPEND_ECHOES = ("calls that an append repeats are dropped by `call_id`", _CODEX)
    APPEND_MISUSE = (
        "an append that cannot be taken is answered: an error, or the socket is closed",
        _CODEX,
    )
    SEGMENT_USAGE = ("the usage in `response.done` is that of the segment", _CODEX)
    CREATE_ABANDONS = ("a create while a run is suspended gives it up, and is answered", _CODEX)

    # --- Inject ---

    INJECT_RESUMES = (
        "a response stays open at its calls, and goes on when their outputs are injected",
        _AGENTS,
    )
    INJECT_IS_ATOMIC = (
        "what cannot be injected comes back whole, and changes nothing",
        f"{_AGENTS}; {_FRAMES}, response.inject.failed",
    )
    INJECT_AFTER_END = (
        "an inject after the end is `response_already_completed`, with its input",
        f"{_AGENTS}; {_FRAMES}, response.inject.failed",
    )
    INJECT_IS_LOCAL = (
        "an inject reaches the responses of its own connection only",
        f"{_AGENTS}; {_FRAMES}, response.inject.failed",
    )
    INJECT_MALFORMED = (
        "a malformed inject is a 400, and the server closes the connection",
        f"{_AGENTS}; {_FRAMES}",
    )


class NonconformityError(Exception):
    """The server breaks a rule: that of the check which notices, where no other is named."""

    def __init__(self, message: str, rule: Rule | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rule = rule


class NotSupportedError(Exception):
    """The server does not offer what a check is about, and says so."""


class UnusableError(Exception):
    """The server cannot be checked: it is not there, or lets nobody in."""


def require(holds: bool, rule: Rule, message: str) -> None:
    """Raise unless ``rule`` holds.

    Raises:
        NonconformityError: it does not; ``message`` says what came.
    """
    if not holds:
        raise NonconformityError(message, rule)


def expect(holds: bool, message: str) -> None:
    """Raise unless what a check is about holds.

    Raises:
        NonconformityError: of the rule that the check cites.
    """
    if not holds:
        raise NonconformityError(message)
