"""What the model thread tells of a segment, turned into what its consumer is given.

The token log is written here, as the consumer gets to see the tokens. Where the client has
no more patience, or something to say, the reading ends, whatever the model has sampled since then.
"""

from collections import deque
from collections.abc import Collection

from sampler.counters import Counters
from sampler.engine_error import EngineError
from sampler.outputs import ArgumentsDelta, ReasoningDelta, ReasoningDone, TextDelta
from sampler.run import Origin, Run, RunEvent, RunState, StopReason
from sampler.sampled_turn import SampledTurn, TurnOutput
from sampler.sampling import Sampled
from sampler.token_channel import Token


class TurnReader:
    """Reads one turn of a run: messages in, outputs out."""

    def __init__(
        self, run: Run, turn: SampledTurn, stop_ids: Collection[int], counters: Counters
    ) -> None:
        """Read what is sampled of ``turn``, which a token of ``stop_ids`` ends."""
        self.reason: StopReason | None = None
        """Why there is nothing more to read."""
        self.is_over = False
        """Whether the model thread is done with the turn."""
        self._run = run
        self._turn = turn
        self._stop_ids = stop_ids
        self._segment = run.segments[-1]
        self._counters = counters
        self._ends_item = False

    def read(self, messages: deque[Token]) -> list[TurnOutput]:
        """Take the next messages and return what they decide.

        What has come at once is told at once: several pieces of one text are one. But for where the
        client may have something to say: what follows is left for the next time.
        """
        outputs: list[TurnOutput] = []
        while messages:
            for output in self._read(messages):
                if outputs and (longer := joined(outputs[-1], output)) is not None:
                    outputs[-1] = longer
                else:
                    outputs.append(output)
            if self._ends_item or (self._run.wanted_stop is not None and self.heed_wish()):
                break
        return outputs

    def _read(self, messages: deque[Token]) -> list[TurnOutput]:
        sampled = self._next(messages)
        if not sampled:
            self.is_over = True
            reason = messages.popleft()
            assert not isinstance(reason, Sampled), "that would have been next"
            self.reason = reason
            return []
        if self._run.state is RunState.PREFILLING:
            self._run.apply(RunEvent.DECODE)
        self._run.tokens.append([token.token_id for token in sampled], Origin.SAMPLED)
        self._segment.output_tokens += len(sampled)
        self._counters.tokens_sampled += len(sampled)
        outputs = self._turn.feed(sampled)
        self._ends_item = bool(outputs) and isinstance(outputs[-1], ReasoningDone)
        return outputs

    def _next(self, messages: deque[Token]) -> list[Sampled]:
        """Take the next tokens: all that there are, or one where the reading may end behind it."""
        at_once = 1 if self._turn.may_think or self._run.wanted_stop is not None else len(messages)
        sampled: list[Sampled] = []
        while messages and len(sampled) < at_once:
            message = messages[0]
            if not isinstance(message, Sampled):
                break
            sampled.append(message)
            messages.popleft()
        return sampled

    def heed_wish(self) -> bool:
        """Stop after the last token, if that is what the client wants and it can be done there.

        Returns:
            Whether it is.
        """
        wanted = self._run.wanted_stop
        if self.is_over or self._run.tokens.last in self._stop_ids:
            return False  # the turn has ended by itself
        if wanted is StopReason.CANCELLED or (wanted is StopReason.STEERED and self._ends_item):
            self.reason = wanted
        return self.reason is not None

    def finish(self) -> list[TurnOutput]:
        """Return what was held back: there is a reason to stop.

        Raises:
            EngineError: the turn ended inside a call, although a grammar binds it.
        """
        if self.reason is StopReason.END_OF_TURN:
            if self._turn.is_in_call and self._turn.matcher is not None:
                raise EngineError("a call was not finished: its schema may admit no arguments")
            outputs = self._turn.end()
            if self._turn.calls:
                self.reason = StopReason.TOOL_CALLS
        else:
            outputs = self._turn.flush()
        self._segment.reasoning_tokens = self._turn.num_reasoning_tokens
        return outputs


def joined(first: TurnOutput, second: TurnOutput) -> TurnOutput | None:
    """Return both pieces as one, if they are of one text."""
    match first, second:
        case TextDelta(), TextDelta():
            return TextDelta(first.text + second.text, first.logprobs + second.logprobs)
        case ArgumentsDelta(), ArgumentsDelta():
            return ArgumentsDelta(first.text + second.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(first.text + second.text)
        case _:
            return None
