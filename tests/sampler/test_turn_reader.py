from collections import deque
from collections.abc import Iterable

import pytest

from sampler.counters import Counters
from sampler.detokenizer import Detokenizer
from sampler.outputs import ReasoningDelta, ReasoningDone, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.run import Run, RunEvent, Segment, StopReason
from sampler.sampled_turn import SampledTurn
from sampler.sampling import Sampled
from sampler.tokenizer import Tokenizer
from sampler.turn_reader import TurnReader
from tests.sampler.smollm2 import smollm2_tokenizer

Messages = deque[Sampled | StopReason | None]
END = StopReason.END_OF_TURN


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return smollm2_tokenizer()


def reader_of(tokenizer: Tokenizer, *, thinks: bool = False) -> tuple[TurnReader, Run]:
    run = Run("run", SamplingParams(), Constraint(thinks=thinks))
    run.segments.append(Segment(0, 0, requested_at=0.0))
    run.apply(RunEvent.PREFILL)
    turn = SampledTurn(Detokenizer(tokenizer), None, may_call=False, thinks=thinks)
    return TurnReader(run, turn, tokenizer.stop_ids, Counters()), run


def messages(tokenizer: Tokenizer, *said: str | StopReason) -> Messages:
    read: Messages = deque()
    for part in said:
        if isinstance(part, StopReason):
            read.append(part)
        else:
            read.extend(map(Sampled, tokenizer.encode_text(part)))
    return read


def text_of(outputs: Iterable[object]) -> list[str]:
    return [output.text for output in outputs if isinstance(output, TextDelta | ReasoningDelta)]


def test_what_has_come_at_once_is_told_at_once(tokenizer: Tokenizer) -> None:
    reader, run = reader_of(tokenizer)
    at_once = messages(tokenizer, "The harbour lay quiet in the early light.", END)
    num_tokens = len(at_once) - 1

    outputs = reader.read(at_once)

    assert text_of(outputs) == ["The harbour lay quiet in the early light."]
    assert not at_once
    assert reader.reason is END
    assert len(run.tokens) == run.segments[0].output_tokens == num_tokens > 5


def test_what_comes_one_by_one_is_told_one_by_one(tokenizer: Tokenizer) -> None:
    reader, _ = reader_of(tokenizer)
    one_by_one = messages(tokenizer, "The harbour lay quiet.")

    outputs = [reader.read(deque([message])) for message in one_by_one]

    assert all(len(each) == 1 for each in outputs)


def test_thoughts_and_text_are_told_apart_and_the_client_may_speak_between(
    tokenizer: Tokenizer,
) -> None:
    reader, run = reader_of(tokenizer, thinks=True)
    at_once = messages(tokenizer, "<think>\nHm, hm.\n</think>\n\n", "Sunny.", END)

    thoughts = reader.read(at_once)
    run.wanted_stop = StopReason.STEERED
    stops = reader.heed_wish()

    assert text_of(thoughts) == ["Hm, hm."]
    assert isinstance(thoughts[-1], ReasoningDone)
    assert at_once, "what follows is left"
    assert stops
    assert reader.reason is StopReason.STEERED


def test_whoever_wants_no_more_gets_one_token_at_most(tokenizer: Tokenizer) -> None:
    reader, run = reader_of(tokenizer)
    at_once = messages(tokenizer, "The harbour lay quiet.")
    run.wanted_stop = StopReason.CANCELLED

    outputs = reader.read(at_once)

    assert text_of(outputs) == ["The"]
    assert reader.reason is StopReason.CANCELLED
    assert run.segments[0].output_tokens == 1
