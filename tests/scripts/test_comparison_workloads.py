"""The traces that are shipped, those that are made to order, and what becomes of them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from sampler.chat_template import ChatMLFormat
from sampler.replay import Replays
from sampler.traces import Trace, TraceCall, read_traces, write_traces
from scripts.comparison.make_traces import FOLDER, Figures, figures_of, shipped_traces
from scripts.comparison.workloads import ToolSeconds, Workload, distinct, synthetic_trace
from tests.sampler.smollm2 import smollm2_tokenizer

SHIPPED = {trace.name: trace for trace in shipped_traces()}
MAX_CONTEXT = 7500
DECODE_RATE, PREFILL_RATE = 200.0, 1200.0

every_shipped_trace = pytest.mark.parametrize("name", SHIPPED)


@cache
def chat_format() -> ChatMLFormat:
    return ChatMLFormat(smollm2_tokenizer())


def figures(trace: Trace) -> Figures:
    return figures_of(trace, smollm2_tokenizer(), chat_format())


def num_tokens(text: str) -> int:
    return len(smollm2_tokenizer().encode_text(text))


def calls_of(trace: Trace) -> list[TraceCall]:
    return [call for turn in trace.turns for call in turn.calls]


def turn_lengths(trace: Trace) -> list[int]:
    replays = Replays([trace], smollm2_tokenizer(), chat_format())
    return [len(replays.turn_ids(trace.name, index)) for index in range(len(trace.turns))]


def made(tool_seconds: ToolSeconds = (0.0,), seed: int = 0, num_calls: int = 20) -> Trace:
    return synthetic_trace(
        "made",
        num_calls=num_calls,
        context_tokens=400,
        result_tokens=100,
        turn_tokens=40,
        tool_seconds=tool_seconds,
        seed=seed,
    )


# --- The shipped traces ---------------------------------------------------------------------------


@every_shipped_trace
def test_the_file_is_what_is_made(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.jsonl"
    write_traces(tmp_path / path.name, [SHIPPED[name]])

    data = path.read_bytes()

    assert data == (tmp_path / path.name).read_bytes()
    assert len(data) < 100_000
    assert read_traces(path) == [SHIPPED[name]]


def test_there_are_no_other_files() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "num_turns"), [("coding-agent", 43), ("retrieval", 12), ("many-small-calls", 60)]
)
def test_a_shipped_trace_has_its_turns_and_fits_the_default_model(
    name: str, num_turns: int
) -> None:
    found = figures(SHIPPED[name])

    assert found.num_turns == num_turns
    assert found.context_tokens < MAX_CONTEXT


@every_shipped_trace
def test_tools_take_about_half_of_the_time(name: str) -> None:
    share = figures(SHIPPED[name]).pause_share(DECODE_RATE, PREFILL_RATE)
    assert 0.4 <= share <= 0.6


def test_the_coding_agent_reads_much_and_says_little() -> None:
    found = figures(SHIPPED["coding-agent"])
    assert found.input_to_output > 80
    assert found.prefix_reuse > 0.96


def test_pages_are_long_and_readings_are_short() -> None:
    pages = [num_tokens(call.output) for call in calls_of(SHIPPED["retrieval"])]
    readings = [num_tokens(call.output) for call in calls_of(SHIPPED["many-small-calls"])]

    assert 300 <= min(pages) <= max(pages) <= 600
    assert max(readings) <= 3


def test_the_figures_are_those_of_the_conversation_token_by_token() -> None:
    found = figures(made(num_calls=2))

    first, second, third = found.contexts
    said = turn_lengths(made(num_calls=2))
    assert found.input_tokens == first + second + third
    assert found.output_tokens == sum(said)
    assert found.reread_tokens == (first + said[0]) + (second + said[1])
    assert found.context_tokens == third + said[2]


# --- Made to order --------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [150, 1000, 4000])
@pytest.mark.parametrize("result", [10, 200, 1000])
@pytest.mark.parametrize("turn", [32, 100])
def test_a_synthetic_trace_is_about_as_long_as_asked(context: int, result: int, turn: int) -> None:
    trace = synthetic_trace(
        "long", num_calls=3, context_tokens=context, result_tokens=result, turn_tokens=turn
    )

    results = [num_tokens(call.output) for call in calls_of(trace)]
    assert len(results) == 3
    assert figures(trace).contexts[0] == pytest.approx(context, rel=0.15)
    assert results == [pytest.approx(result, rel=0.15)] * 3
    assert turn_lengths(trace) == [pytest.approx(turn, rel=0.15)] * 4


def test_a_seed_decides_all_words() -> None:
    assert made(seed=1) == made(seed=1)
    assert made(seed=1).input != made(seed=2).input
    assert calls_of(made(seed=1))[0].output != calls_of(made(seed=2))[0].output


def test_seconds_are_given_call_by_call_and_then_from_the_first_again() -> None:
    seconds = [call.seconds for call in calls_of(made((0.5, 2.0), num_calls=3))]
    assert seconds == [0.5, 2.0, 0.5]


def test_bimodal_seconds_are_short_for_four_of_five_calls() -> None:
    seconds = [call.seconds for call in calls_of(made("bimodal"))]
    assert sum(each < 0.1 for each in seconds) == 16
    assert sum(each >= 1 for each in seconds) == 4


def test_a_synthetic_trace_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_traces(path, [made("bimodal"), distinct(made("bimodal"), 3)])
    assert len(read_traces(path)) == 2


# --- Several at once ------------------------------------------------------------------------------

EVERY = {**SHIPPED, "made": made()}


@pytest.mark.parametrize("name", EVERY)
def test_other_words_are_of_the_same_shape(name: str, tmp_path: Path) -> None:
    trace, path = EVERY[name], tmp_path / "other.jsonl"

    other = distinct(trace, 3)

    write_traces(path, [other])
    assert read_traces(path) == [other]
    assert [len(turn.calls) for turn in other.turns] == [len(turn.calls) for turn in trace.turns]
    assert [c.seconds for c in calls_of(other)] == [c.seconds for c in calls_of(trace)]
    assert figures(other).context_tokens == pytest.approx(figures(trace).context_tokens, rel=0.1)
    assert figures(other).output_tokens == pytest.approx(figures(trace).output_tokens, rel=0.1)


@pytest.mark.parametrize("name", EVERY)
def test_runs_at_once_share_instructions_and_tools_and_nothing_else(name: str) -> None:
    traces = Workload("three", EVERY[name], concurrency=3).traces()

    first, *others = traces
    assert first == EVERY[name]
    assert len({trace.name for trace in traces}) == 3
    assert {trace.instructions for trace in others} == {first.instructions}
    assert [trace.tools for trace in others] == [first.tools] * 2
    assert not shared([said_in(trace.input)[:12] for trace in traces])
    long = [[call.output for call in calls_of(trace) if len(call.output) > 60] for trace in traces]
    assert not shared(long)


def said_in(value: object) -> str:
    assert isinstance(value, str)
    return value


def shared(texts: Sequence[Sequence[str]] | Sequence[str]) -> set[str]:
    """Return what is the same at the same place in two of ``texts``."""
    columns = [texts] if isinstance(texts[0], str) else list(zip(*texts, strict=True))
    return {str(text) for column in columns for text in column if list(column).count(text) > 1}


def test_messages_and_parts_of_the_input_get_other_words_too() -> None:
    items = ({"role": "user", "content": [{"type": "input_text", "text": "see the garden"}]},)
    trace = Trace(name="parts", input=items, tools=made().tools, turns=made().turns)

    other = distinct(trace, 1)

    assert isinstance(other.input, tuple)
    [message] = other.input
    [part] = message["content"]
    assert (message["role"], part["type"]) == ("user", "input_text")
    assert part["text"] != "see the garden"
    assert len(part["text"]) == len("see the garden")
