"""Traces said again, on a tiny model with real weights and on a simulated one.

Without being forced, neither of them would say anything of the kind.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace

import pytest

from protocol.items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
    parse_items,
)
from protocol.tools import callable_tools, parse_tools
from sampler.conversation import Conversation
from sampler.detokenizer import Detokenizer
from sampler.engine import Resumption
from sampler.grammar import GrammarCompiler
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.outputs import CallDone, Output, SegmentEnded, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.recorded_turn import Call, Item, RecordedTurn
from sampler.replay import ReplayError, Replays, num_turns_said
from sampler.run import Run, RunState, StopReason
from sampler.sampled_turn import SampledTurn
from sampler.sampling import Sampled
from sampler.suspension import Suspension
from sampler.traces import Trace, TraceCall, TraceTurn
from tests.sampler.runs import ending, names_called, resume_with, sample, text_of
from tests.sampler.templates import BYTE_LEVEL, formats
from tests.sampler.test_simulated import TALK, model_of
from tests.tiny_model import IM_END, call_text, tiny_model

READ = {
    "type": "function",
    "name": "read",
    "description": "Read a file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
PATCH = {"type": "custom", "name": "patch", "description": "Edit files"}
OPENED = TraceTurn(
    text="I will look at both files.",
    calls=(
        TraceCall(name="read", arguments='{"path": "a.py"}', output="import b\n"),
        TraceCall(name="read", arguments='{"path":"b \\u00e9.py"}', output="<|im_end|>"),
    ),
)
PATCHED = TraceTurn(
    calls=(TraceCall(name="patch", input="- import b\n+ import c\n", output="Done."),),
    messages=({"role": "user", "content": "Be quick."},),
)
DONE = TraceTurn(text="The import is fixed: naïve, but it works 🙂.")
TRACE = Trace(
    name="fix",
    instructions="You are an agent.",
    tools=(READ, PATCH),
    input="Fix the import.",
    turns=(OPENED, PATCHED, DONE),
)
TOOLS = tuple(callable_tools(parse_tools([READ, PATCH])))
ASKED = Message("user", "Fix the import.")
FORMATS = formats()
PARAMS = SamplingParams(temperature=1.0, seed=7)


def simulated_model() -> LoadedModel:
    return model_of(TALK)


@pytest.fixture(params=[tiny_model, simulated_model])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    """An engine on either model, which is not ahead by a whole turn."""
    with closing(LocalEngine(request.param(), window=8)) as engine:
        yield engine


@dataclass
class Replayed:
    """A run that says what a trace does, and what came of it."""

    run: Run
    outputs: list[Output]

    @property
    def sampled(self) -> list[tuple[int, ...]]:
        """The tokens of each turn."""
        return [output.token_ids for output in self.outputs if isinstance(output, SegmentEnded)]


def replays_of(engine: LocalEngine, trace: Trace = TRACE) -> Replays:
    return Replays([trace], engine.model.tokenizer, engine.model.chat_format)


def forcing(token_ids: tuple[int, ...]) -> Constraint:
    return Constraint(TOOLS, forced_ids=token_ids)


async def open_forced(
    engine: LocalEngine, items: Sequence[Item], token_ids: tuple[int, ...], params: SamplingParams
) -> Run:
    conversation = Conversation(items, TRACE.instructions, TOOLS)
    prompt = await engine.encode(conversation)
    return engine.open_run("replayed", prompt.token_ids, params, forcing(token_ids))


async def replay_suspended(engine: LocalEngine, params: SamplingParams = PARAMS) -> Replayed:
    """Hold all of the trace in one run."""
    replays = replays_of(engine)
    turns = iter(TRACE.turns)
    indices = itertools.count(1)
    run = await open_forced(engine, [ASKED], replays.turn_ids("fix", 0), params)

    async def call_tools(suspension: Suspension) -> Resumption:
        turn = next(turns)
        outputs = [call.output for call in turn.calls]
        answers = dict(zip(suspension.awaited, outputs, strict=True))
        answered = suspension.answer(answers, messages_in(turn))
        constraint = forcing(replays.turn_ids("fix", next(indices)))
        return await resume_with(engine, run, answered, constraint)

    return Replayed(run, await sample(engine, run, call_tools))


async def replay_stateless(engine: LocalEngine, params: SamplingParams = PARAMS) -> list[Replayed]:
    """Hold each turn in a run of its own, on the history as a client resends it."""
    replays = replays_of(engine)
    items: list[InputItem] = [ASKED]
    replayed = []
    for turn in TRACE.turns:
        index = num_turns_said(Conversation(items))
        run = await open_forced(engine, items, replays.turn_ids("fix", index), params)
        outputs = await sample(engine, run)
        replayed.append(Replayed(run, outputs))
        items += resent(outputs, turn)
    return replayed


def messages_in(turn: TraceTurn) -> list[Message]:
    items = parse_items(list(turn.messages))
    return [item for item in items if isinstance(item, Message)]


def resent(outputs: Sequence[Output], turn: TraceTurn) -> list[InputItem]:
    """Return what was said in ``outputs``, and what came of it, as a client would send it."""
    said = text_of(outputs)
    calls = [output.call for output in outputs if isinstance(output, CallDone)]
    answers = [
        CallOutput(call.call_id, known.output)
        for call, known in zip(calls, turn.calls, strict=True)
    ]
    text = [Message("assistant", said)] if said else []
    return [*text, *calls, *answers, *messages_in(turn)]


# --- A turn says what the trace does -------------------------------------------------------------


async def test_a_run_says_the_trace_and_is_suspended_at_its_calls(engine: LocalEngine) -> None:
    replayed = await replay_suspended(engine)

    outputs = replayed.outputs
    calls = [output.call for output in outputs if isinstance(output, CallDone)]
    said = [call.input if isinstance(call, CustomToolCall) else call.arguments for call in calls]
    reasons = [output.reason for output in outputs if isinstance(output, SegmentEnded)]
    assert text_of(outputs) == OPENED.text + DONE.text
    assert names_called(outputs) == ["read", "read", "patch"]
    assert said == ['{"path": "a.py"}', '{"path":"b \\u00e9.py"}', "- import b\n+ import c\n"]
    assert reasons == [StopReason.TOOL_CALLS, StopReason.TOOL_CALLS, StopReason.END_OF_TURN]
    assert replayed.run.state is RunState.COMPLETED


@pytest.mark.slow
async def test_a_history_sent_again_gives_the_tokens_of_the_suspended_run(
    engine: LocalEngine,
) -> None:
    suspended = await replay_suspended(engine)

    stateless = await replay_stateless(engine)

    assert [turn for replayed in stateless for turn in replayed.sampled] == suspended.sampled
    assert stateless[-1].run.tokens.ids == suspended.run.tokens.ids


async def test_as_much_is_forwarded_as_if_it_were_sampled(engine: LocalEngine) -> None:
    replayed = await replay_suspended(engine)

    num_tokens = len(replayed.run.tokens)
    assert engine.counters.tokens_forwarded == replayed.run.num_forwarded == num_tokens - 1
    assert engine.counters.tokens_sampled == sum(map(len, replayed.sampled))
    assert engine.counters.tokens_reforwarded == 0


async def test_nothing_of_the_trace_is_encoded_while_it_is_replayed(engine: LocalEngine) -> None:
    replays = replays_of(engine)
    encodes = engine.counters.encodes

    for index in range(3):
        replays.turn_ids("fix", index)

    assert engine.counters.encodes == encodes


@pytest.mark.parametrize("penalty", [0.0, 2.0])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_no_parameter_changes_what_is_said(
    engine: LocalEngine, temperature: float, penalty: float
) -> None:
    params = SamplingParams(temperature, 0.5, seed=3, presence_penalty=penalty)

    replayed = await replay_suspended(engine, params)

    replays = replays_of(engine)
    assert replayed.sampled == [replays.turn_ids("fix", index) for index in range(3)]


async def test_a_turn_is_cut_short_by_the_budget_for_tokens(engine: LocalEngine) -> None:
    turn_ids = replays_of(engine).turn_ids("fix", 2)
    run = await open_forced(engine, [ASKED], turn_ids, replace(PARAMS, max_output_tokens=5))

    outputs = await sample(engine, run)

    assert ending(outputs).reason is StopReason.MAX_OUTPUT_TOKENS
    assert run.sampled_in_segment() == list(turn_ids[:5])


async def test_a_turn_can_be_cancelled(engine: LocalEngine) -> None:
    turn_ids = replays_of(engine).turn_ids("fix", 2)
    run = await open_forced(engine, [ASKED], turn_ids, PARAMS)
    outputs: list[Output] = []

    async with aclosing(engine.sample(run)) as given:
        async for output in given:
            outputs.append(output)
            if isinstance(output, TextDelta):
                run.wanted_stop = StopReason.CANCELLED

    said = run.sampled_in_segment()
    assert ending(outputs).reason is StopReason.CANCELLED
    assert said == list(turn_ids[: len(said)])
    assert len(said) < len(turn_ids)


async def test_runs_that_share_steps_say_each_their_own(engine: LocalEngine) -> None:
    replays = replays_of(engine)
    turns = [replays.turn_ids("fix", index) for index in (2, 0, 2, 1)]
    opened = [await open_forced(engine, [ASKED], turn_ids, PARAMS) for turn_ids in turns]

    together = await asyncio.gather(*(sample(engine, run) for run in opened))

    assert [ending(outputs).token_ids for outputs in together] == turns


async def test_log_probabilities_are_those_of_the_model(engine: LocalEngine) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_output_tokens=8, top_logprobs=2)
    prompt = await engine.encode(Conversation([ASKED]))
    free = engine.open_run("free", prompt.token_ids, params, Constraint())
    chosen = await sample(engine, free)
    token_ids = (*free.sampled_in_segment(), IM_END)
    constraint = Constraint(forced_ids=token_ids)
    forced = engine.open_run("forced", prompt.token_ids, params, constraint)

    outputs = await sample(engine, forced)

    (tokens, values), (chosen_tokens, chosen_values) = logprobs_in(outputs), logprobs_in(chosen)
    assert tokens == chosen_tokens != []
    assert values == pytest.approx(chosen_values, abs=1e-4)


def logprobs_in(outputs: Sequence[Output]) -> tuple[list[str], list[float]]:
    """Return the tokens, and how likely each of them was."""
    logprobs = [lp for o in outputs if isinstance(o, TextDelta) for lp in o.logprobs]
    return [lp.token for lp in logprobs], [lp.logprob for lp in logprobs]


async def test_calls_are_text_where_there_are_no_tools(engine: LocalEngine) -> None:
    prompt = await engine.encode(Conversation([ASKED]))
    constraint = Constraint(forced_ids=replays_of(engine).turn_ids("fix", 1))
    run = engine.open_run("replayed", prompt.token_ids, PARAMS, constraint)

    outputs = await sample(engine, run)

    assert names_called(outputs) == []
    assert '"patch"' in text_of(outputs)


# --- The tokens of a turn ------------------------------------------------------------------------


def test_a_turn_is_encoded_as_the_model_would_say_it_and_ends() -> None:
    model = tiny_model()
    replays = Replays([TRACE], model.tokenizer, model.chat_format)

    *said, end = replays.turn_ids("fix", 0)

    calls = [call_text(call.name, call.arguments or "") for call in OPENED.calls]
    assert said == model.tokenizer.encode_text(OPENED.text + "\n".join(calls))
    assert end == IM_END


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_the_chat_format_the_turn_is_read_as_it_is_in_the_trace(name: str) -> None:
    chat_format = FORMATS[name]
    replays = Replays([TRACE], BYTE_LEVEL, chat_format)
    opens_thinking = chat_format.opens_thinking(chat_format.prompt_ids(Conversation([ASKED])))
    for index, turn in enumerate(TRACE.turns):
        turn_ids = replays.turn_ids("fix", index)

        sampled = SampledTurn(
            Detokenizer(BYTE_LEVEL), None, may_call=True, thinks=True, think_is_open=opens_thinking
        )
        outputs = [output for token_id in turn_ids for output in sampled.feed([Sampled(token_id)])]
        outputs += sampled.flush()

        found = [(call.qualified_name, meant_by(call)) for call in sampled.calls]
        assert found == [(call.qualified_name, meant_by(call)) for call in turn.call_items()]
        assert text_of(outputs).strip() == turn.text
        assert [token_id for token_id in turn_ids if token_id in BYTE_LEVEL.stop_ids] == [IM_END]
        assert turn_ids[-1] == IM_END


def meant_by(call: Call) -> object:
    return call.input if isinstance(call, CustomToolCall) else json.loads(call.arguments)


@pytest.mark.parametrize("name", ["ChatML", "Qwen", "no tools"])
def test_the_tokens_are_those_of_the_turn_in_a_history(name: str) -> None:
    chat_format = FORMATS[name]
    replays = Replays([TRACE], BYTE_LEVEL, chat_format)
    items: list[Item] = [ASKED, Message("assistant", OPENED.text), *OPENED.call_items()]
    items += [CallOutput(f"call_{index}", "x") for index in range(2)]
    before = chat_format.prompt_ids(Conversation([ASKED], tools=TOOLS))

    turn_ids = replays.turn_ids("fix", 0)

    history = chat_format.prompt_ids(Conversation(items, tools=TOOLS))
    assert history[: len(before) + len(turn_ids)] == [*before, *turn_ids]


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("other", 0, "expected the name of a trace, got 'other'"),
        ("fix", 3, "trace 'fix' is over: all of its 3 turns were said"),
    ],
)
def test_a_turn_that_is_not_there_is_refused(name: str, index: int, message: str) -> None:
    model = tiny_model()
    replays = Replays([TRACE], model.tokenizer, model.chat_format)

    with pytest.raises(ReplayError) as caught:
        replays.turn_ids(name, index)

    assert str(caught.value) == message


def test_a_constraint_with_known_tokens_compiles_no_grammar() -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)
    matcher = compiler.matcher(forcing((65, IM_END)))
    assert matcher is not None

    first, mask = matcher.only_token, matcher.mask()
    matcher.accept(65)

    assert first == 65
    assert mask.nonzero()[0].tolist() == [65]
    assert matcher.only_token == IM_END
    assert [matcher.allows(token_id) for token_id in (65, IM_END)] == [False, True]


# --- Which turn is due ---------------------------------------------------------------------------

CALL, OTHER = FunctionCall("call_1", "read", "{}"), CustomToolCall("call_2", "patch", "x")
OUTPUT, OTHER_OUTPUT = CallOutput("call_1", "a"), CallOutput("call_2", "b")
SAID = Message("assistant", "Hm.")
RECORDED = RecordedTurn((SAID, CALL), (1, 2))


@pytest.mark.parametrize(
    ("items", "number"),
    [
        ([ASKED], 0),
        ([ASKED, SAID], 1),
        ([ASKED, SAID, CALL, OTHER, OUTPUT, OTHER_OUTPUT], 1),
        ([ASKED, ReasoningItem("Well."), CALL, OUTPUT, ReasoningItem("So."), OTHER], 2),
        ([ASKED, SAID, CALL, OUTPUT, ASKED, SAID], 2),
        ([ASKED, SAID, ASKED, SAID, ASKED], 2),
        ([ASKED, RECORDED, OUTPUT, RECORDED], 2),
        ([ASKED, RECORDED, OUTPUT, OTHER, OTHER_OUTPUT], 2),
        ([ASKED, SAID, CALL, OUTPUT, RECORDED, OUTPUT], 2),
    ],
)
def test_turns_said_are_counted_however_they_are_told(items: Sequence[Item], number: int) -> None:
    assert num_turns_said(Conversation(items)) == number
