"""One assistant turn while an endpoint streams it: chunks in, outputs out.

Chunks may tell of several things at a time; outputs come one after the other. The order is this:

*   **Thoughts come first.** Those that come after text or a call are dropped. The sampling loop
    gives thoughts before all else, a message is classified where a call or the end closes it, and a
    message of the assistant has one place for its thoughts, which is before what it says.
*   **Then text**, as it comes. White space is held back until something else is said, and dropped
    where that is a call, and where the turn ends, as ``tool_calls.TurnParser`` does.
*   **Then calls**, in the order in which they begin. The first one streams live. Pieces of a later
    one are held back until the one before is complete: when its arguments are a whole JSON object
    and another call has begun, or else when the turn ends. What comes for a call after that has no
    meaning and is dropped.
*   **Text after a call** comes when the turn ends, after the last call.

Which call a piece belongs to its ``index`` says, in theory. In practice there are endpoints that
leave it out, that say 0 for every call, and that count on without beginning a call; some make a new
id for each piece, some none. ``_call_of`` has the rules.

Where a turn is cut short, the first call that is not a whole JSON object stays open, and nothing
comes after it: it was never made. Where the model ended the turn, its calls are given as they were
sampled, JSON or not: whoever runs the tool tells the model what is wrong with it.
"""

from collections.abc import Collection, Iterator, Mapping

from protocol.items import CustomToolCall, FunctionCall
from protocol.output_items import Logprob
from protocol.tools import split_name
from protocol.validation import JsonObject
from sampler.engine_error import EngineError
from sampler.engines.chat.chunk import CallPiece, ChatUsage, Chunk, read_chunk, stop_reason
from sampler.engines.chat.json_text import object_in
from sampler.engines.chat.tools import ToolNames, input_in
from sampler.outputs import (
    ArgumentsDelta,
    CallDone,
    CallStarted,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
)
from sampler.recorded_turn import Call
from sampler.run import StopReason
from sampler.sampled_turn import TurnOutput, new_call_id

_MAX_ID_LENGTH = 64
"""The longest ``call_id`` that clients can store."""


class ChatTurn:
    """What an endpoint has said since the turn began, as the client sees it."""

    def __init__(
        self,
        names: ToolNames,
        *,
        taken_call_ids: Collection[str] = (),
        wants_logprobs: bool = False,
    ) -> None:
        """Begin a turn.

        Args:
            names: of the run's tools. A tool that is not among them is called like any other: that
                there is none is for the client to say.
            taken_call_ids: those that other calls of the run have. The endpoint's id of a call is
                kept, unless it is one of these, empty, or longer than 64 characters.
            wants_logprobs: whether text comes with its log-probabilities.
        """
        self.calls: list[Call] = []
        """The complete calls, in the order in which they began."""
        self.stop_reason: StopReason | None = None
        """Why the endpoint stopped; None until it says so."""
        self.usage: ChatUsage | None = None
        """What the request took, as the endpoint said last."""
        self.num_bytes = 0
        """How long all that the endpoint has said is."""
        self.num_thought_bytes = 0
        """How much of that were thoughts."""
        self.time_info: Mapping[str, float] | None = None
        """The times that Cerebras tells, in seconds."""
        self._names = names
        self._taken_call_ids = set(taken_call_ids)
        self._wants_logprobs = wants_logprobs
        self._is_finished = False
        self._is_thinking = False
        self._wrote_text = False
        self._text = _HeldText()
        self._begun: list[_Call] = []
        self._at_index: dict[int, _Call] = {}
        self._last: _Call | None = None  # the call that the latest piece belonged to

    def feed(self, chunk: JsonObject) -> list[TurnOutput]:
        """Take the next chunk and return what it decides.

        Raises:
            EngineError: it is no chunk of a chat completion.
            EndpointError: the endpoint says that it has failed.
        """
        said = read_chunk(chunk, wants_logprobs=self._wants_logprobs)
        self.usage = said.usage or self.usage
        self.time_info = said.time_info or self.time_info
        self.num_bytes += said.num_bytes
        self.num_thought_bytes += len(said.thought.encode())
        self.stop_reason = stop_reason(said) or self.stop_reason
        return [*self._think(said), *self._write(said), *self._call(said)]

    def finish(self) -> list[TurnOutput]:
        """Return what was held back; the turn is over.

        Raises:
            EngineError: there are arguments for a tool that was never named.
        """
        if self._is_finished:
            return []
        self._is_finished = True
        return list(self._rest())

    # --- Thoughts and text ------------------------------------------------------------------------

    def _think(self, said: Chunk) -> Iterator[TurnOutput]:
        if said.thought and not self._wrote_text and not self._begun:
            self._is_thinking = True
            yield ReasoningDelta(said.thought)

    def _end_thoughts(self) -> Iterator[TurnOutput]:
        if self._is_thinking:
            self._is_thinking = False
            yield ReasoningDone()

    def _write(self, said: Chunk) -> Iterator[TurnOutput]:
        self._text.add(said.text, said.logprobs)
        if said.text and not self._begun and (self._wrote_text or not self._text.is_blank):
            yield from self._written()

    def _written(self) -> Iterator[TurnOutput]:
        yield from self._end_thoughts()
        self._wrote_text = True
        yield TextDelta(*self._text.take())

    # --- Calls ------------------------------------------------------------------------------------

    def _call(self, said: Chunk) -> Iterator[TurnOutput]:
        for piece in said.pieces:
            self._last = self._call_of(piece)
            self._last.add(piece)
        while len(self.calls) < len(self._begun):
            call = self._begun[len(self.calls)]
            yield from self._told(call)
            if call is self._begun[-1] or not (call.is_started and call.is_whole):
                break
            yield from self._done(call)

    def _call_of(self, piece: CallPiece) -> "_Call":
        """Return the call that ``piece`` belongs to, which may begin with it.

        It is the call of its index or, where it has no index, of its id, or else the latest. Where
        there is no call of that index, arguments alone go on with the latest call too. A piece that
        the call so found cannot have begins another one.
        """
        if piece.index is not None:
            call = self._at_index.get(piece.index)
        else:
            call = self._with_id(piece.id) or self._last
        if call is None and piece.is_arguments_only:
            call = self._last
        return call if call is not None and call.may_have(piece) else self._new_call(piece)

    def _with_id(self, call_id: str) -> "_Call | None":
        return next((call for call in self._begun if call_id and call.id == call_id), None)

    def _new_call(self, piece: CallPiece) -> "_Call":
        if not self._begun and not self._wrote_text:
            self._text.take()  # white space, which goes before text only
        call = _Call()
        self._begun.append(call)
        if piece.index is not None:
            self._at_index[piece.index] = call
        return call

    def _told(self, call: "_Call") -> Iterator[TurnOutput]:
        """Give what is not given yet of ``call``, whose turn has come."""
        if not call.name:
            return
        name = self._names.qualified(call.name)
        is_custom = self._names.is_custom(name)
        if not call.is_started:
            yield from self._end_thoughts()
            call.call_id = self._call_id(call.id)
            yield CallStarted(call.call_id, name, is_custom)
        # The text for a free-form tool is inside a string of JSON, and comes when that is whole.
        if not is_custom and (text := call.take()):
            yield ArgumentsDelta(text)

    def _done(self, call: "_Call") -> Iterator[TurnOutput]:
        qualified = self._names.qualified(call.name)
        namespace, name = split_name(qualified)
        done: Call
        if self._names.is_custom(qualified):
            text = input_in(call.arguments)
            if text:
                yield ArgumentsDelta(text)
            done = CustomToolCall(call.call_id, name, text, namespace)
        else:
            done = FunctionCall(call.call_id, name, call.arguments, namespace)
        call.is_over = True
        self.calls.append(done)
        yield CallDone(done)

    def _call_id(self, call_id: str) -> str:
        if not 0 < len(call_id) <= _MAX_ID_LENGTH or call_id in self._taken_call_ids:
            call_id = new_call_id()
        self._taken_call_ids.add(call_id)
        return call_id

    # --- The end ----------------------------------------------------------------------------------

    def _rest(self) -> Iterator[TurnOutput]:
        was_cut = self.stop_reason is not StopReason.END_OF_TURN
        if not was_cut and any(call.arguments and not call.name for call in self._begun):
            raise EngineError("the endpoint sent arguments for a tool that it never named")
        for call in self._begun[len(self.calls) :]:
            if not call.name:
                continue  # nothing was said of it
            yield from self._told(call)
            if was_cut and not call.is_whole:
                return
            yield from self._done(call)
        if not self._text.is_blank:
            yield from self._written()
        if not was_cut:
            yield from self._end_thoughts()


class _Call:
    """A call, as far as its pieces have come."""

    def __init__(self) -> None:
        self.id = ""
        """The endpoint's."""
        self.name = ""
        """By which the endpoint knows the tool."""
        self.call_id = ""
        """The client's, once the call is given."""
        self.is_over = False
        self._pieces: list[str] = []
        self._num_taken = 0

    @property
    def is_started(self) -> bool:
        """Whether the client knows of it."""
        return bool(self.call_id)

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object, which nothing can be added to."""
        last = self._pieces[-1].rstrip() if self._pieces else ""
        return last[-1:] in ("", "}") and object_in(self.arguments) is not None

    def add(self, piece: CallPiece) -> None:
        """Take ``piece``. Names and ids come whole, and repetitions of them say nothing."""
        self.id = self.id or piece.id
        self.name = self.name or piece.name
        if piece.arguments and not self.is_over:
            self._pieces.append(piece.arguments)

    def take(self) -> str:
        """Return the arguments that came since they were taken last."""
        text = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return text

    def may_have(self, piece: CallPiece) -> bool:
        """Tell whether ``piece`` can be a further piece of this call.

        A name is said again by some endpoints, for a named tool by vLLM, which made a new id each
        time. But a tool of another name is another call's, and so are arguments behind those that
        are whole.
        """
        if not (piece.name and self.name):
            return True
        if piece.name != self.name:
            return False
        if piece.id and self.id and (piece.id == self.id or piece.index is None):
            return piece.id == self.id
        return not (piece.arguments.strip() and self.is_whole)


class _HeldText:
    """Text that is not given yet, and the log-probabilities of its tokens."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._logprobs: list[Logprob] = []
        self.is_blank = True
        """Whether it is white space only."""

    def add(self, text: str, logprobs: tuple[Logprob, ...]) -> None:
        if text:
            self._pieces.append(text)
            self.is_blank = self.is_blank and text.isspace()
        self._logprobs += logprobs

    def take(self) -> tuple[str, tuple[Logprob, ...]]:
        """Return all of it, and hold nothing."""
        taken = "".join(self._pieces), tuple(self._logprobs)
        self._pieces, self._logprobs, self.is_blank = [], [], True
        return taken
