"""Our whole sampling loop over the real vLLM: a suspended run says what any other run says.

Weights and arithmetic are in fp32, where a token does not depend on how its context was cut.
"""

import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import pytest_asyncio
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from sampler.embedded_model import EMBEDDED_MODEL_NAME
from sampler.engine_error import EngineError
from sampler.outputs import TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.run import Run, StopReason
from tests.end_to_end.process import START_SECONDS, ServerProcess, started
from tests.vllm.real_runs import ARGUMENTS, FORCED, WEATHER, Real, calls_of, real_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

MOST = 24
GREEDY = SamplingParams(temperature=0, max_output_tokens=MOST * 4)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_output_tokens=MOST * 4),
    "penalised": SamplingParams(
        temperature=0.7,
        seed=3,
        presence_penalty=0.3,
        frequency_penalty=0.5,
        max_output_tokens=MOST * 4,
    ),
}
QUESTIONS = (
    "What is the weather in Oslo, and what should I wear? Explain at length.",
    "Compare Rome and Lima for a holiday. Write several paragraphs.",
)
ANSWERS = ('{"sky": "clear", "celsius": -3}', "sunny, 24 °C")
BOUNDS = (FORCED, FORCED, Constraint())
"""The model is made to call twice, and may say what it likes then."""


TOOL = {
    "type": "function",
    "name": WEATHER.name,
    "description": WEATHER.description,
    "parameters": WEATHER.parameters,
}

Table = list[tuple[str, ...]]
WIDTHS = (44, 30, 60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Real]:
    async with real_runs() as real:
        yield real


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Print what was measured, at the end."""
    rows: Table = []
    yield rows
    lines = ("  ".join(map(str.ljust, row, WIDTHS)).rstrip() for row in rows)
    sys.stdout.write("\n\n" + "\n".join(lines) + "\n")


def turns_of(run: Run) -> list[list[int]]:
    """Return what each segment has sampled."""
    return [
        run.tokens.since(segment.input_tokens)[: segment.output_tokens] for segment in run.segments
    ]


def text_of(token_ids: list[int], real: Real) -> str:
    """Return the characters of tokens."""
    return "".join(map(real.tokenizer.token_text, token_ids))


async def suspended(
    real: Real, question: str, params: SamplingParams, tool_seconds: float = 0.0
) -> Run:
    """Return a run that was suspended twice, and is over."""
    prompt = await real.prompt(question)
    run = await real.open(prompt.token_ids, params, BOUNDS[0])
    await real.play(run, ANSWERS, BOUNDS[1:], tool_seconds)
    assert len(run.segments) == len(BOUNDS)
    return run


async def from_history(real: Real, run: Run) -> list[list[int]]:
    """Return what each segment of ``run`` is, sampled by a new run from all that came before."""
    said = []
    for segment, constraint in zip(run.segments, BOUNDS, strict=True):
        history = run.tokens.ids[: segment.input_tokens]
        fresh = await real.open(history, run.params, constraint)
        await real.play(fresh)
        assert fresh.segments[0].cached_tokens == 0
        said += turns_of(fresh)
    return said


@pytest.mark.parametrize("name", PARAMS)
async def test_suspended_and_from_the_whole_history_the_tokens_are_the_same(
    real: Real, name: str, table: Table
) -> None:
    lengths, texts = list[list[int]](), list[str]()
    for question in QUESTIONS:
        run = await suspended(real, question, PARAMS[name])

        assert turns_of(run) == await from_history(real, run)
        lengths.append([len(turn) for turn in turns_of(run)])
        texts.append(text_of(turns_of(run)[-1], real)[:28])
    table.append((f"{name}: suspended = full history", str(lengths), str(texts)))


@pytest.mark.parametrize("name", PARAMS)
async def test_chained_the_tokens_are_the_same(real: Real, name: str, table: Table) -> None:
    run = await suspended(real, QUESTIONS[0], PARAMS[name])

    said: list[int] = []
    chained = list(run.tokens.ids[: run.segments[0].input_tokens])
    for index, constraint in enumerate(BOUNDS):
        link = real.engine.open_run(f"link-{name}-{index}", chained, run.params, constraint)
        await real.play(link)
        said = turns_of(link)[0]
        assert said == turns_of(run)[index]
        if index + 1 < len(BOUNDS):
            start = run.segments[index].input_tokens + len(said)
            chained += said + list(run.tokens.ids[start : run.segments[index + 1].input_tokens])
    table.append((f"{name}: chained = suspended", f"{len(chained) + len(said)} tokens in all"))


async def test_calls_are_what_the_grammar_admits(real: Real, table: Table) -> None:
    prompt = await real.prompt(QUESTIONS[1])
    run = await real.open(prompt.token_ids, PARAMS["seeded"], FORCED)

    outputs = await real.play(run, ANSWERS[:1], (Constraint(),))

    (arguments,) = calls_of(outputs)
    assert json.loads(arguments)["city"] in ("Oslo", "Rome", "Lima")
    table.append(("forced to call, then free", arguments))
    assert run.segments[1].stop_reason in (StopReason.END_OF_TURN, StopReason.MAX_OUTPUT_TOKENS)


async def test_to_resume_forwards_the_pending_token_and_the_suffix(
    real: Real, table: Table
) -> None:
    await real.counts.prefilled()
    forwarded = real.engine.counters.tokens_forwarded

    run = await suspended(real, QUESTIONS[0], GREEDY)

    first, *others = run.segments
    suffixes = []
    for segment, before in zip(others, run.segments, strict=False):
        suffixes.append(segment.input_tokens - before.input_tokens - before.output_tokens)
    prefilled = await real.counts.prefilled()
    assert prefilled == [first.input_tokens, *(1 + length for length in suffixes)]
    assert real.engine.counters.tokens_forwarded - forwarded == len(run.tokens) - 1
    assert run.tokens_reforwarded == 0
    row = [f"{segment.input_tokens} of context" for segment in run.segments]
    table.append(("prefilled by vLLM, by segment", str(prefilled), ", ".join(row)))


async def test_a_run_that_was_given_up_comes_back_with_the_same_tokens(
    real: Real, table: Table
) -> None:
    kept = await suspended(real, QUESTIONS[1], PARAMS["seeded"])
    discards = real.engine.counters.discards
    await real.counts.prefilled()

    given_up = await suspended(real, QUESTIONS[1], PARAMS["seeded"], tool_seconds=1.5)

    assert real.engine.counters.discards == discards + 2
    assert turns_of(given_up) == turns_of(kept)
    prefilled = await real.counts.prefilled()
    segments = given_up.segments
    assert prefilled == [segment.input_tokens - segment.cached_tokens for segment in segments]
    assert given_up.tokens_reforwarded == given_up.tokens_forwarded - (len(given_up.tokens) - 1)
    table.append(("given up and back: the same tokens; prefilled", str(prefilled)))


async def test_a_run_that_cannot_be_sampled_fails_and_others_go_on(real: Real) -> None:
    prompt = await real.prompt(QUESTIONS[0])
    # A turn that is known beforehand, and that nothing ends.
    bad = await real.open(prompt.token_ids, PARAMS["seeded"], Constraint(forced_ids=(500, 600)))

    with pytest.raises(EngineError):
        await real.play(bad)

    good = await suspended(real, QUESTIONS[0], GREEDY)
    assert turns_of(good) == await from_history(real, good)


async def test_log_probabilities_come_with_every_segment(real: Real) -> None:
    params = SamplingParams(temperature=0.5, seed=2, top_logprobs=3, max_output_tokens=MOST)
    prompt = await real.prompt(QUESTIONS[0])
    run = await real.open(prompt.token_ids, params, Constraint())

    outputs = await real.play(run)

    told = [one for output in outputs if isinstance(output, TextDelta) for one in output.logprobs]
    assert len(told) >= run.segments[0].output_tokens - 1
    for one in told:
        values = [top.logprob for top in one.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert one.logprob <= values[0]


# --- The server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = [f"--engine-arg={key}={json.dumps(value)}" for key, value in ARGUMENTS.items()]
    stderr = tmp_path_factory.mktemp("server") / "stderr"
    with started(stderr, "--model", f"vllm:{EMBEDDED_MODEL_NAME}", *arguments) as server:
        server.wait_until_it_listens()
        yield server
        server.send(signal.SIGTERM)
        assert server.wait(60) == 0, server.stderr


@contextmanager
def connected(server: ServerProcess) -> Iterator[Connection]:
    url = f"ws://127.0.0.1:{server.port}/v1/responses?dialect=append"
    with connect(url, proxy=None, open_timeout=START_SECONDS) as socket:
        yield socket


def asked(socket: Connection, event_type: str, **members: Any) -> list[dict[str, Any]]:
    """Send an event and return what it is answered with, up to the end of the segment."""
    socket.send(json.dumps({"type": event_type, **members}))
    events: list[dict[str, Any]] = []
    closing = ("response.completed", "response.incomplete", "response.failed", "response.done")
    while not events or events[-1]["type"] not in closing:
        events.append(json.loads(socket.recv(timeout=START_SECONDS)))
        assert events[-1]["type"] != "error", events[-1]
    return events


def created(socket: Connection) -> dict[str, Any]:
    """Have a run made that has to call, and return what ends its first segment."""
    return asked(
        socket,
        "response.create",
        model=EMBEDDED_MODEL_NAME,
        input=QUESTIONS[0],
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=MOST * 4,
    )[-1]


def test_a_run_over_a_websocket_is_suspended_and_goes_on(
    server: ServerProcess, table: Table
) -> None:
    with connected(server) as socket:
        first = created(socket)
        (call,) = [i for i in first["response"]["output"] if i["type"] == "function_call"]
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": ANSWERS[0]}
        second = asked(socket, "response.append", input=[answer])[-1]

    assert first["type"] == "response.done"
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome", "Lima")
    assert second["type"] != "response.failed"
    before, after = first["response"]["usage"], second["response"]["usage"]
    cached = after["input_tokens_details"]["cached_tokens"]
    assert cached == before["input_tokens"] + before["output_tokens"] - 1
    context = f"then {after['input_tokens']} tokens of context, {cached} of them cached"
    table.append(("over a WebSocket (append)", f"call {call['arguments']}", context))


def engine_core_of_the_server() -> psutil.Process:
    """Return the process of vLLM's that the server has started."""
    (server,) = (child for child in psutil.Process().children() if "server" in child.cmdline())
    (core,) = (child for child in server.children() if "EngineCore" in " ".join(child.cmdline()))
    return core


def test_when_vllm_dies_the_server_stays_up_and_says_so(
    server: ServerProcess, table: Table
) -> None:
    with connected(server) as socket:
        created(socket)
        engine_core_of_the_server().kill()
        server.wait_until_it_logs("EngineDeadError")

    with connected(server) as socket:
        failed = created(socket)

    assert failed["type"] == "response.failed"
    message = failed["response"]["error"]["message"]
    assert "has died" in message
    table.append(("vLLM killed; the next run", message))
