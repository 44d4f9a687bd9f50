"""Turns that are known beforehand: a trace, said again by the model.

What a client measures depends on what the model says. So that a comparison has the same content in
all designs and on all models, a run can be made to say what a trace says. Each forward pass is made
as it would be, and its logits are there; only the choice of the token is taken away. Which turn is
due follows from the conversation alone, so it does not matter how a client brings it about.

The tokens are the canonical ones: those that the chat format makes of the turn's items when a
client sends them back. So a history that is encoded anew has the same tokens as the run that it
came from.
"""

from collections.abc import Iterable, Sequence

from protocol.items import CallOutput, Compaction, InputItem, Message
from sampler.chat_template import ChatFormat
from sampler.conversation import Conversation, Turn, text_of
from sampler.echoes import is_said
from sampler.recorded_turn import RecordedTurn
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import THINK_END
from sampler.traces import Trace, TraceTurn


class ReplayError(ValueError):
    """There is no such trace, or it has no such turn; the message is for the client."""


class Replays:
    """Traces in the tokens of one model.

    They are encoded when this is made, so that no request has that in its time or its counts.
    """

    def __init__(
        self, traces: Iterable[Trace], tokenizer: Tokenizer, chat_format: ChatFormat
    ) -> None:
        """Encode ``traces``; of those of one name the last one counts.

        Raises:
            ConversationError: the chat format cannot lay them out.
        """
        turns = _TurnEncoder(tokenizer, chat_format)
        self._turns = {trace.name: tuple(map(turns.encode, trace.turns)) for trace in traces}

    def turn_ids(self, name: str, index: int) -> tuple[int, ...]:
        """Return the ids of a whole turn, as the model would sample them, its end included.

        Args:
            name: the trace's.
            index: how many turns have been said before it.

        Raises:
            ReplayError: there is no such trace, or it is over by then.
        """
        turns = self._turns.get(name)
        if turns is None:
            raise ReplayError(f"expected the name of a trace, got {name!r}")
        if index >= len(turns):
            raise ReplayError(f"trace {name!r} is over: all of its {len(turns)} turns were said")
        return turns[index]


def num_turns_said(conversation: Conversation) -> int:
    """Return how many turns of the assistant there are in ``conversation``.

    It is the same number whether they are recorded turns or the items that a client resends.
    """
    num_turns, is_open = 0, False
    for item in conversation.items:
        if isinstance(item, RecordedTurn):
            num_turns, is_open = num_turns + 1, False
        elif is_said(item):
            num_turns, is_open = num_turns + (not is_open), True
        elif isinstance(item, Message | CallOutput | Compaction):
            is_open = False
    return num_turns


class _TurnEncoder:
    """Makes token ids of a trace's turns."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._asked = Message("user", "x")
        self._before = chat_format.prompt_ids(Conversation([self._asked]))

    def encode(self, turn: TraceTurn) -> tuple[int, ...]:
        """Return what stands for the turn in a prompt, from where the model's turn begins."""
        calls = turn.call_items()
        text = [Message("assistant", turn.text)] if turn.text else []
        told: Sequence[InputItem] = [self._asked, *text, *calls]
        prompt = self._chat_format.prompt_ids(Conversation(told))
        length = len(self._before)
        ends = [i + 1 for i in range(length, len(prompt)) if prompt[i] in self._tokenizer.stop_ids]
        if prompt[:length] == self._before and ends:
            return tuple(prompt[length : ends[0]])
        # A template that tells of a turn in another way than it has the model begin one.
        thoughts = f"{THINK_END}\n\n" if self._chat_format.opens_thinking(self._before) else ""
        said = thoughts + text_of(Turn("assistant", turn.text, calls))
        return (*self._tokenizer.encode_text(said), self._chat_format.end_of_turn)
