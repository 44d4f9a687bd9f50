"""The designs over an endpoint: it says what traces say, and the report says what it told."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from protocol.codec import decode_object
from protocol.validation import JsonObject
from sampler.engines.chat.dialect import OPENAI_CHAT
from sampler.engines.chat.engine import ChatEngine
from sampler.engines.endpoint.client import Endpoint as UpstreamEndpoint
from sampler.engines.endpoint.client import EndpointSettings
from sampler.traces import Trace, TraceCall, TraceTurn, read_traces, write_traces
from scripts import compare as command
from scripts.comparison import comparison
from scripts.comparison.agents import CompareError, Endpoint, hold
from scripts.comparison.claims import caching
from scripts.comparison.engines import RemoteModel, Servers
from scripts.comparison.experiments import ENDPOINT, Experiment, Part, Point, at_endpoint
from scripts.comparison.findings import answer
from scripts.comparison.measures import asked_again, read_again, total_seconds
from scripts.comparison.report import render
from scripts.comparison.results import (
    AgentRun,
    Design,
    EndpointTimes,
    EndpointTurn,
    Results,
    Trial,
    Turn,
)
from scripts.comparison.statistics import BASELINE, Measured
from scripts.comparison.tables import endpoint_grids, summary_grids
from scripts.comparison.trials import numbered, unnumbered
from scripts.comparison.workloads import FIND, Workload, synthetic_trace
from server.settings import Settings
from tests.sampler.engines.fake_endpoint import (
    MODEL,
    Chunk,
    Delta,
    FakeEndpoint,
    Script,
    ends,
    fake_endpoint,
    says,
)
from tests.sampler.engines.replaying_endpoint import Replaying
from tests.scripts.example_results import split, trial, turn
from tests.server.running import serving

app = typer.Typer()
app.command()(command.main)

FILES: JsonObject = {
    "type": "namespace",
    "name": "files",
    "description": "Files",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}
TRACE = Trace(
    name="patch",
    instructions="Be brief. " * 60,
    tools=(FIND, FILES, {"type": "custom", "name": "patch", "description": "Patches a file"}),
    input="Fix it.",
    turns=(
        TraceTurn(
            text="Let me look.",
            calls=(
                TraceCall(name="find", arguments='{"query": "it"}', output="a.py " * 200),
                TraceCall(name="files.read", arguments="{}", output="b.py"),
            ),
        ),
        TraceTurn(calls=(TraceCall(name="patch", input='+ "line"\n', output="ok"),)),
        TraceTurn(text="It is fixed."),
    ),
)
SMALL = synthetic_trace("small", num_calls=1, context_tokens=400, result_tokens=40)


@asynccontextmanager
async def server_of(fake: FakeEndpoint) -> AsyncIterator[Endpoint]:
    """Serve what ``fake`` samples."""
    upstream = UpstreamEndpoint(EndpointSettings(fake.url, fake.api_key))
    engine = ChatEngine(MODEL, upstream, OPENAI_CHAT)
    settings = Settings(recent_responses=64, store=False)
    async with serving(engine=engine, settings=settings) as running:
        yield Endpoint(running.url, MODEL)


async def held(design: Design, trace: Trace = TRACE) -> AgentRun:
    """Hold ``trace`` at an endpoint that replays ``TRACE``."""
    async with fake_endpoint() as fake, server_of(fake) as endpoint:
        fake.answer = Replaying([SMALL, TRACE]).script
        return await hold(design, endpoint, numbered(trace, 7))


# --- What the endpoint says ----------------------------------------------------------------------


def conversation(*later: str, user: str = "Fix it.", system: str | None = None) -> JsonObject:
    """Return a request's body that begins as ``TRACE`` does; ``later`` are roles."""
    return {
        "messages": [
            {"role": "system", "content": TRACE.instructions if system is None else system},
            {"role": "user", "content": user},
            *({"role": role, "content": "x"} for role in later),
        ]
    }


def said(script: Script) -> tuple[str, dict[str, str]]:
    """Return the text of ``script``, and the arguments of its calls by name."""
    text, names, arguments = "", dict[int, str](), dict[int, str]()
    for step in script:
        assert isinstance(step, Delta)
        text += step.members.get("content", "")
        for call in step.members.get("tool_calls", ()):
            index, function = call["index"], call["function"]
            names[index] = function.get("name") or names[index]
            arguments[index] = arguments.get(index, "") + function["arguments"]
    return text, {names[index]: arguments[index] for index in names}


def refusal(script: Script) -> tuple[int, str]:
    """Return the status and the code that ``script`` refuses with."""
    (error,) = script
    assert not isinstance(error, Delta)
    return error.status, decode_object(error.body)["code"]  # type: ignore[union-attr]


def test_the_turn_that_is_due_is_said_in_pieces() -> None:
    replaying = Replaying([SMALL, TRACE])

    first = replaying.script(conversation())
    second = replaying.script(conversation("assistant", "tool", "tool"))
    last = replaying.script(conversation("assistant", "tool", "tool", "assistant", "tool"))

    text, called = said(first)
    assert text == "Let me look."
    assert called["find"] == '{"query": "it"}'
    assert len(first) > 3 + 2 + 4
    assert [decode_object(one) for one in said(second)[1].values()] == [{"input": '+ "line"\n'}]
    assert said(last) == ("It is fixed.", {})


def test_a_trace_is_known_whatever_the_number_of_its_run() -> None:
    replaying = Replaying([TRACE])

    for number in (1, 999_999, 1_000_000):
        user = numbered(TRACE, number).input
        assert unnumbered(str(user)) == "Fix it."
        assert said(replaying.script(conversation(user=str(user))))[0] == "Let me look."


@pytest.mark.parametrize(
    "body",
    [
        conversation(user="Break it."),
        conversation(system="Be long."),
        conversation(*["assistant", "tool"] * 3),
        {"messages": conversation()["messages"][1:]},
        {"prompt": [1, 2, 3]},
    ],
)
def test_any_other_conversation_is_refused(body: JsonObject) -> None:
    assert refusal(Replaying([TRACE]).script(body)) == (400, "unknown_conversation")


# --- Its process ---------------------------------------------------------------------------------

PROCESS = [sys.executable, "-m", "tests.sampler.engines.replaying_endpoint"]


@contextmanager
def started(arguments: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """Start a process in a group of its own, of which nothing is left in the end."""
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield process
        finally:
            if process.returncode is None:  # so its id is still that of its group
                os.killpg(process.pid, signal.SIGKILL)


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def traces_file(tmp_path: Path) -> Path:
    write_traces(tmp_path / "traces.jsonl", [SMALL])
    return tmp_path / "traces.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_when_it_is_told_to(number: signal.Signals, traces_file: Path) -> None:
    with started([*PROCESS, "--traces", str(traces_file)]) as process:
        assert url_of(process).endswith("/v1")
        process.send_signal(number)

        assert process.wait(60) == 0


@pytest.mark.slow
def test_the_process_ends_when_its_parent_is_gone(traces_file: Path) -> None:
    line = shlex.join([*PROCESS, "--traces", str(traces_file)])
    with started(["sh", "-c", f"{line} & wait"]) as shell:
        assert url_of(shell).endswith("/v1")
        shell.kill()

        assert shell.stdout is not None
        assert shell.stdout.read() == ""  # which ends with the last process that may write


# --- What agents find ----------------------------------------------------------------------------


@pytest.mark.parametrize("design", Design)
async def test_a_trace_is_held_at_an_endpoint_in_each_design(design: Design) -> None:
    run = await held(design)

    assert len(run.turns) == 3
    for one in run.turns:
        assert one.endpoint is not None
        assert one.endpoint.times is not None
        assert one.endpoint.tries == 1
        assert one.tokens_forwarded == one.input_tokens - one.cached_tokens + one.output_tokens
        assert one.split is not None
        assert total_seconds(one.split) == pytest.approx(one.seconds)
        assert one.split.decode == one.endpoint.times.completion
        assert one.split.prefill == one.endpoint.times.prompt
    assert run.turns[2].cached_tokens > 0


async def test_in_all_designs_the_endpoint_counts_the_same() -> None:
    runs = [(await held(design)).turns for design in Design]

    counts = [[(t.input_tokens, t.cached_tokens, t.output_tokens) for t in run] for run in runs]
    assert all(count == counts[0] for count in counts)


@pytest.mark.parametrize("design", [Design.STATELESS_CACHE, Design.SUSPENDED])
async def test_an_endpoint_that_says_something_else_is_found_out(design: Design) -> None:
    turns = (*TRACE.turns[:2], TraceTurn(text="It is broken."))

    with pytest.raises(CompareError, match=r"expected the text 'It is broken.', got 'It is fixed"):
        await held(design, msgspec.structs.replace(TRACE, turns=turns))


async def test_what_an_endpoint_does_not_know_fails() -> None:
    with pytest.raises(CompareError, match="no trace begins like this"):
        await held(Design.SUSPENDED, msgspec.structs.replace(TRACE, input="Break it."))


async def test_an_endpoint_need_not_tell_its_times() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    ending = Chunk({"choices": [choice], "usage": usage})
    trace = Trace(name="t", input="Well?", turns=(TraceTurn(text="Yes."),))

    script = [*says("Yes."), ending, *ends(None)]
    async with fake_endpoint(script) as fake, server_of(fake) as endpoint:
        (one,) = (await hold(Design.CHAINED, endpoint, trace)).turns

    assert one.endpoint is not None
    assert one.endpoint.times is None
    assert one.split is not None
    assert one.split.upstream == 0
    assert one.split.prefill > 0
    assert (one.input_tokens, one.output_tokens, one.tokens_forwarded) == (9, 3, 12)


# --- What is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_quick", [True, False])
def test_calls_are_varied_in_all_designs_with_tools_that_answer_at_once(is_quick: bool) -> None:
    experiment = at_endpoint("endpoint m", is_quick=is_quick)

    (part,) = experiment.parts
    assert [point.x for point in part.points] == [1, 10, 20]
    assert [len(point.workload.trace.turns) - 1 for point in part.points] == [1, 10, 20]
    seconds = [c.seconds for t in experiment.traces() for turn in t.turns for c in turn.calls]
    assert set(seconds) == {0.0}
    assert set(part.designs) == {
        *(Design.STATELESS, Design.STATELESS_CACHE, Design.CHAINED, Design.SUSPENDED),
        *(Design.SUSPENDED_INJECT, Design.AGAIN, Design.SUSPENDED_AGAIN),
    }


def test_only_a_server_that_samples_has_memory_for_keys_and_values() -> None:
    servers = Servers([SMALL], ("--threads", "1"), RemoteModel("http://there/v1", "m"))

    remote = servers.options("endpoint m")

    assert remote[:4] == ["--model", "openai-chat:m", "--endpoint", "http://there/v1"]
    assert not {"--kv-memory", "--reserve-kv", "--threads"} & set(remote)
    local = servers.options("int4")
    assert {"--kv-memory", "--threads", "--safety"} <= set(local)
    assert "--endpoint" not in local


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["--quick", *arguments])


def test_an_endpoint_has_to_be_named(tmp_path: Path) -> None:
    result = compare("--only", ENDPOINT, "--out", str(tmp_path / "new"))

    assert result.exit_code == 2
    assert "needs --endpoint URL" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "new").exists()


def test_the_traces_can_be_had_beforehand(tmp_path: Path) -> None:
    result = compare("--write-traces", str(tmp_path / "t"), "--out", str(tmp_path / "new"))

    assert result.exit_code == 0, result.output
    assert read_traces(tmp_path / "t") == at_endpoint("", is_quick=True).traces()
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_designs_are_compared_over_an_endpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def small(engine: str, *, is_quick: bool) -> Experiment:
        point = Point(1, Workload("1 call", SMALL))
        return Experiment(ENDPOINT, "Small", "?", "calls", 1.0, (Part(engine, (point,), DESIGNS),))

    monkeypatch.setattr(comparison, "at_endpoint", small)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    write_traces(tmp_path / "t", small("", is_quick=True).traces())
    fast = ["--traces", str(tmp_path / "t"), "--rate", "0", "--prefill-rate", "0"]
    with started([*PROCESS, *fast]) as process:
        options = ["--only", ENDPOINT, "--endpoint", url_of(process), "--repeats", "1"]
        result = compare(*options, "--out", str(tmp_path / "out"))

    assert result.exit_code == 0, result.output
    results = Results.decode((tmp_path / "out" / "results.json").read_bytes())
    assert {one.engine for one in results.trials} == {f"endpoint {MODEL}"}
    (stateless,), (suspended,) = [
        [one.runs[0].turns for one in results.trials if one.design == design] for design in DESIGNS
    ]
    assert [_counts(one) for one in stateless] == [_counts(one) for one in suspended]
    assert sum(one.tokens_forwarded or 0 for one in suspended) == max(
        one.counts["tokens_forwarded"] for one in results.trials
    )
    assert suspended[1].bytes_sent < stateless[1].bytes_sent
    assert "openai-chat" in str(results.settings)
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<h2 id="endpoint">Over an endpoint</h2>' in page


DESIGNS = (Design.STATELESS_CACHE, Design.SUSPENDED)


def _counts(one: Turn) -> tuple[int, int, int, int | None]:
    return one.input_tokens, one.cached_tokens, one.output_tokens, one.tokens_forwarded


# --- What the report says ------------------------------------------------------------------------

TIMES = EndpointTimes(queue=0.001, prompt=0.01, completion=0.02)


def told(one: Turn, times: EndpointTimes | None = TIMES, *, tries: int = 1) -> Turn:
    endpoint = EndpointTurn(tries=tries, admission=0.0, times=times)
    return msgspec.structs.replace(one, endpoint=endpoint)


def at_an_endpoint(times: EndpointTimes | None = TIMES, **parts: float) -> list[Trial]:
    """Return rounds of the main designs, of which the stateless one takes its time."""
    one = told(turn(split(decode=0.02, pre_inference=0.001, **parts)), times)
    slow = told(turn(split(decode=0.02, pre_inference=0.1, prefill=0.1)), times)
    labels: dict[str, Any] = {"experiment": ENDPOINT, "engine": "endpoint m"}
    trials = [
        trial(design, [slow if design is Design.STATELESS else one] * 21, **labels, round_number=n)
        for n in range(3)
        for design in (*DESIGNS, Design.AGAIN, Design.SUSPENDED_AGAIN, Design.STATELESS)
    ]
    for each in trials:
        each.counts["tokens_reforwarded"] = 5.0
    return trials


def report_of(trials: list[Trial]) -> str:
    return render(Results(command="scripts/compare", began_at=0.0, trials=trials))


def test_a_report_says_what_is_different_at_an_endpoint() -> None:
    page = report_of(at_an_endpoint())

    assert '<h2 id="endpoint">' in page
    assert "are by its own clock" in page
    assert "to the endpoint and back" in page
    assert "Over an endpoint: end to end" in page


def test_a_report_says_where_an_endpoint_tells_no_times() -> None:
    page = report_of(at_an_endpoint(None))

    assert "are by its own clock" not in page
    assert "Not all turns came with times" in page


def test_no_design_is_said_to_be_without_the_caches_of_an_endpoint() -> None:
    said = " ".join(answer(Measured(at_an_endpoint())))

    assert "stateless without caches but the endpoint's" in said
    assert "without any cache" not in said


def test_a_report_without_an_endpoint_does_not_speak_of_one() -> None:
    local = [trial(design, [turn(split(decode=0.02))] * 21) for design in DESIGNS]

    page = report_of(local)

    assert "endpoint" not in page


def test_the_claim_on_caching_is_not_judged_where_no_design_forgets() -> None:
    assert caching(Measured(at_an_endpoint())).evidence == ()


def test_what_only_one_design_can_count_is_not_shown() -> None:
    measured = Measured(at_an_endpoint())

    details = [
        detail
        for grid in summary_grids(measured)
        for row in grid.rows
        for entry in row.entries
        for detail in entry.details
    ]

    assert not [detail for detail in details if "again" in detail]


def test_the_tables_of_an_endpoint_have_each_design_once() -> None:
    counts, parts = endpoint_grids(Measured(at_an_endpoint()))

    for grid in (counts, parts):
        assert [row.name for row in grid.rows] == [*DESIGNS, Design.STATELESS]
        assert all(len(row.entries) == len(grid.columns) - 1 for row in grid.rows)


def test_what_is_read_again_and_asked_again_is_counted_by_turns() -> None:
    turns = [
        turn(split(decode=1.0), input_tokens=100, cached_tokens=0),  # and 24 of output
        told(turn(split(decode=1.0), input_tokens=200, cached_tokens=120), tries=3),
        told(turn(split(decode=1.0), input_tokens=210, cached_tokens=230)),
    ]

    one = trial(BASELINE, turns)

    assert read_again(one) == 124 - 120
    assert asked_again(one) == 2
    assert asked_again(trial(BASELINE, turns[:1])) is None
