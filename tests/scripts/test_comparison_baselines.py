"""Outside servers are processes. Here a program takes their places that computes nothing, and
answers, writes to its log and fails as they do. The real ones are asked where the environment names
their interpreters, as ``LLAMA_CPP_PYTHON`` and ``TRANSFORMERS_PYTHON``."""

import itertools
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import pytest

from protocol.items import parse_items
from protocol.tools import callable_tools, parse_tools
from protocol.validation import JsonObject
from sampler.chat_template import ChatMLFormat
from sampler.conversation import Conversation
from sampler.replay import Replays
from sampler.traces import Trace, TraceCall, TraceTurn
from scripts.comparison.baselines import measure_baselines
from scripts.comparison.outside_process import RunningServer, running
from scripts.comparison.outside_servers import BaselineError, OutsideServer, installed_servers
from scripts.comparison.outside_steps import Step, embedded_tokenizer, steps_of
from scripts.comparison.results import Trial
from scripts.comparison.trials import Numbers
from scripts.comparison.workloads import Workload
from tests.sampler.smollm2 import smollm2_directory, smollm2_tokenizer

FAKE = """
import json, os, sys, uuid
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

kind, manner, tokenizer_file = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer_file)
known = []
num_asked = 0

def say_what_is_known(ids, request_id):
    num_known = max((len(os.path.commonprefix([ids, other])) for other in known), default=0)
    if kind == "llama.cpp":
        known.clear()
        rest = len(ids) - num_known
        line = f"Llama.generate: {num_known} prefix-match hit, remaining {rest} prompt tokens"
    else:
        line = f"Found a prefix match of {num_known} tokens for request {request_id}"
    if num_known:
        print(line, file=sys.stderr)
    known.append(ids)

def chunk(**members):
    return "data: " + json.dumps({"object": "chat.completion.chunk", **members}) + "\\n\\n"

def choices(finish_reason=None, **delta):
    return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]

async def models(request):
    return Response(status_code=503 if manner == "is ill" else 200)

async def complete(request):
    global num_asked
    num_asked += 1
    body = await request.json()
    request_id = str(uuid.UUID(request.headers["x-request-id"]))
    if kind == "llama.cpp":
        assert body["logit_bias"] == {"0": -100, "2": -100}
    else:
        assert json.loads(body["generation_config"])["eos_token_id"] not in (0, 2)
    if manner == "refuses" or manner == "refuses the fifth" and num_asked == 5:
        return JSONResponse({"error": {"message": "too long"}}, status_code=400)
    turns = (f"<|im_start|>{m['role']}\\n{m['content']}<|im_end|>\\n" for m in body["messages"])
    ids = tokenizer.encode("".join(turns) + "<|im_start|>assistant\\n").ids
    say_what_is_known(ids, request_id)
    return StreamingResponse(said(len(ids), body["max_tokens"]), media_type="text/event-stream")

async def said(num_tokens, max_tokens):
    yield chunk(choices=choices(role="assistant"))
    yield ": ping\\n\\n"
    length = 1 if manner == "stops early" else max_tokens
    for _ in range(length):
        yield chunk(choices=choices(content=" x"))
        if manner == "fails":
            yield chunk(error="out of blocks")
        if manner == "babbles":
            yield "data: {what\\n\\n"
        if manner == "breaks off":
            return
        if manner == "dies":
            os._exit(7)
    usage = {"prompt_tokens": num_tokens, "completion_tokens": length}
    told = {} if kind == "llama.cpp" else {"usage": usage}
    yield chunk(choices=choices("stop" if manner == "stops early" else "length"), **told)
    if kind == "llama.cpp":
        yield "data: [DONE]\\n\\n"

routes = [Route("/v1/models", models), Route("/v1/chat/completions", complete, methods=["POST"])]
uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=0)
"""

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a file",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
PATCH = {"type": "custom", "name": "patch", "description": "Edit a file"}
TRACE = Trace(
    name="mend",
    instructions="You mend things.",
    tools=(LOOK, PATCH),
    input="Mend it.",
    turns=(
        TraceTurn(
            text="I look at both.",
            calls=(
                TraceCall(name="look", arguments='{"path": "a"}', output="x = 1", seconds=0.001),
                TraceCall(name="look", arguments='{"path": "b"}', output="y = 22", seconds=0.002),
            ),
            messages=({"role": "user", "content": "And hurry."},),
        ),
        TraceTurn(calls=(TraceCall(name="patch", input="x = 2", output="done"),)),
        TraceTurn(text="It is mended."),
    ),
)
ITEMS: list[JsonObject] = [
    {"role": "user", "content": "Mend it."},
    {"role": "assistant", "content": "I look at both."},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"path": "a"}'},
    {"type": "function_call", "call_id": "2", "name": "look", "arguments": '{"path": "b"}'},
    {"type": "function_call_output", "call_id": "1", "output": "x = 1"},
    {"type": "function_call_output", "call_id": "2", "output": "y = 22"},
    {"role": "user", "content": "And hurry."},
    {"type": "custom_tool_call", "call_id": "3", "name": "patch", "input": "x = 2"},
    {"type": "custom_tool_call_output", "call_id": "3", "output": "done"},
]
"""What a client resends when it holds the trace."""
WORKLOAD = Workload("2 calls", TRACE)

KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "llama.cpp": lambda num: {"max_tokens": num, "logit_bias": {"0": -100, "2": -100}},
    "transformers": lambda num: {
        "max_tokens": num,
        "generation_config": json.dumps({"eos_token_id": 9}),
    },
}
PREFIX_MATCHES = {
    "llama.cpp": r"(?P<cached>\d+) prefix-match hit, remaining (?P<rest>\d+)",
    "transformers": r"prefix match of (?P<cached>\d+) tokens for request (?P<request>\S+)",
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


@cache
def steps() -> list[Step]:
    return steps_of(TRACE, embedded_tokenizer())


def fake(kind: str, manner: str = "answers") -> OutsideServer:
    tokenizer_file = str(smollm2_directory() / "tokenizer.json")
    return OutsideServer(
        name=kind,
        engine="none",
        model="fake",
        command=[sys.executable, "-P", "-c", FAKE, kind, manner, tokenizer_file],
        members=KINDS[kind],
        prefix_match=re.compile(PREFIX_MATCHES[kind]),
        notes=[f"{kind} is a fake."],
    )


@asynccontextmanager
async def fake_running(kind: str, manner: str = "answers") -> AsyncIterator[RunningServer]:
    async with running(fake(kind, manner), threads=1) as server:
        yield server


async def trial_of(server: RunningServer, *runs: list[Step]) -> Trial:
    return await server.measure(runs, experiment="e", workload="w", x=2, round=0)


# --- The work -------------------------------------------------------------------------------------


def test_the_prompts_have_the_tokens_that_our_own_server_makes_of_them() -> None:
    chat_format = ChatMLFormat(smollm2_tokenizer())
    tools = callable_tools(parse_tools(list(TRACE.tools)))

    lengths = [step.input_tokens for step in steps()]

    assert lengths == [
        len(chat_format.prompt_ids(Conversation(parse_items(items), "You mend things.", tools)))
        for items in (ITEMS[:1], ITEMS[:7], ITEMS)
    ]


def test_each_turn_is_as_long_as_that_of_the_trace() -> None:
    tokenizer = smollm2_tokenizer()
    replays = Replays([TRACE], tokenizer, ChatMLFormat(tokenizer))

    lengths = [step.output_tokens for step in steps()]

    assert lengths == [len(replays.turn_ids("mend", index)) for index in range(3)]


def test_the_history_goes_on_with_the_turn_of_the_trace_and_what_followed_it() -> None:
    first, second, _ = steps()

    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert second.messages[: len(first.messages)] == first.messages
    said, outputs, hurry = second.messages[len(first.messages) :]
    assert said["role"] == "assistant"
    assert said["content"].startswith("I look at both.<tool_call>")
    assert outputs == {
        "role": "user",
        "content": "<tool_response>\nx = 1\n</tool_response>\n"
        "<tool_response>\ny = 22\n</tool_response>",
    }
    assert hurry == {"role": "user", "content": "And hurry."}


def test_calls_of_one_turn_take_as_long_as_the_longest() -> None:
    assert [step.tool_seconds for step in steps()] == [0.002, 0.0, 0.0]


# --- A server -------------------------------------------------------------------------------------


@pytest.mark.slow
@kinds
async def test_a_run_is_held_to_its_end(kind: str) -> None:
    async with fake_running(kind) as server:
        trial = await trial_of(server, steps())

    [run] = trial.runs
    assert (trial.design, trial.engine, trial.concurrency) == (kind, "none", 1)
    assert [turn.input_tokens for turn in run.turns] == [step.input_tokens for step in steps()]
    assert [turn.output_tokens for turn in run.turns] == [step.output_tokens for step in steps()]
    assert all(0 < turn.first_event_seconds <= turn.seconds for turn in run.turns)
    assert all(turn.bytes_sent and turn.bytes_received for turn in run.turns)
    assert run.turns[0].tool_seconds >= 0.002
    assert run.seconds == pytest.approx(run.wall_seconds - sum(t.tool_seconds for t in run.turns))
    assert trial.seconds >= run.wall_seconds
    assert trial.cpu_seconds
    assert server.num_short_turns == 0


@pytest.mark.slow
@kinds
async def test_cached_tokens_are_taken_from_the_log(kind: str) -> None:
    async with fake_running(kind) as server:
        [run] = (await trial_of(server, steps())).runs

    first, second, third = run.turns
    assert first.cached_tokens == 0
    # The header of a turn is in the prompt before it; the turn itself was never sampled.
    assert second.cached_tokens == first.input_tokens
    assert third.cached_tokens == second.input_tokens
    assert second.tokens_forwarded == (
        second.input_tokens - second.cached_tokens + second.output_tokens - 1
    )


@pytest.mark.slow
async def test_runs_at_once_have_their_own_cached_tokens() -> None:
    others = steps_of(Numbers().unlike_all_others(TRACE), embedded_tokenizer())

    async with fake_running("transformers") as server:
        trial = await trial_of(server, steps(), others)

    for run in trial.runs:
        first, second, third = run.turns
        assert second.cached_tokens == first.input_tokens
        assert third.cached_tokens == second.input_tokens


@pytest.mark.slow
@kinds
async def test_turns_that_end_early_are_counted(kind: str) -> None:
    async with fake_running(kind, "stops early") as server:
        [run] = (await trial_of(server, steps())).runs

        assert [turn.output_tokens for turn in run.turns] == [1, 1, 1]
        assert server.num_short_turns == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "why"),
    [
        ("refuses", r"answered 400: .*too long"),
        ("fails", "failed in the middle of a turn: out of blocks"),
        ("babbles", r"expected a chunk of a chat completion, got \{what"),
        ("breaks off", "ended before the turn did"),
        ("dies", r"peer closed|disconnected|incomplete"),
    ],
)
async def test_a_turn_that_does_not_come_to_its_end_is_an_error(manner: str, why: str) -> None:
    async with fake_running("transformers", manner) as server:
        with pytest.raises(BaselineError, match=why) as raised:
            await trial_of(server, steps(), steps())

    assert "Uvicorn running" in str(raised.value)  # what it wrote last


@pytest.mark.slow
async def test_a_server_is_stopped_in_the_end() -> None:
    async with fake_running("transformers") as server:
        assert psutil.pid_exists(server.pid)

    assert not psutil.pid_exists(server.pid)


@pytest.mark.slow
async def test_a_server_that_does_not_start_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = replace(fake("transformers"), command=command)

    with pytest.raises(BaselineError, match=r"status 1\)\n    no such model"):
        async with running(server, threads=1):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["is ill", "never listens"])
async def test_a_server_that_does_not_become_healthy_is_given_up(manner: str) -> None:
    server = fake("transformers", manner)
    if manner == "never listens":
        server = replace(server, command=[sys.executable, "-c", "import time; time.sleep(60)"])

    with pytest.raises(BaselineError, match="transformers: not ready after 1 s"):
        async with running(server, threads=1, patience_seconds=1):
            pass


# --- In turns -------------------------------------------------------------------------------------


async def in_turns(*servers: OutsideServer, rounds: int = 2) -> tuple[list[Trial], list[str], str]:
    """Measure the servers and one of ours, and return the trials, the notes, and who was begun."""
    trials: list[Trial] = []
    begun: list[str] = []

    async def measure_ours(round_number: int) -> Trial:
        return Trial(
            experiment="e",
            engine="int4",
            workload="2 calls",
            x=2,
            design="ours",
            round=round_number,
            concurrency=1,
            runs=[],
            seconds=1,
            cpu_seconds=None,
            counts={},
            loop_lag={},
        )

    notes = await measure_baselines(
        servers,
        WORKLOAD,
        range(rounds),
        experiment="e",
        x=2,
        threads=1,
        numbers=Numbers(),
        taken=trials.append,
        begun=begun.append,
        ours={"ours": measure_ours},
    )
    return trials, notes, " ".join(begun)


@pytest.mark.slow
async def test_all_are_measured_in_each_round_after_one_that_warms_up() -> None:
    trials, notes, begun = await in_turns(fake("llama.cpp"), fake("transformers"))

    started = "llama.cpp transformers "
    warm_up = "transformers ours llama.cpp "
    assert begun == f"{started}{warm_up}ours llama.cpp transformers llama.cpp transformers ours"
    assert [(trial.design, trial.round) for trial in trials] == [
        ("ours", 0),
        ("llama.cpp", 0),
        ("transformers", 0),
        ("llama.cpp", 1),
        ("transformers", 1),
        ("ours", 1),
    ]
    assert {(trial.experiment, trial.workload, trial.x) for trial in trials} == {
        ("e", "2 calls", 2)
    }
    assert notes == ["llama.cpp is a fake.", "transformers is a fake."]


@pytest.mark.slow
async def test_no_round_finds_in_a_cache_what_another_has_left() -> None:
    trials, _, _ = await in_turns(fake("transformers"))

    first, second = (trial.runs[0].turns for trial in trials if trial.design == "transformers")
    # Instructions and tools are the same in all of them.
    assert 0 < first[0].cached_tokens < first[0].input_tokens - 5
    assert [turn.cached_tokens for turn in first] == [turn.cached_tokens for turn in second]


@pytest.mark.slow
async def test_a_server_that_fails_is_left_out_from_then_on() -> None:
    trials, notes, _ = await in_turns(
        fake("llama.cpp", "refuses the fifth"), fake("transformers"), rounds=2
    )

    # It was asked three times while it warmed up.
    assert {trial.design for trial in trials} == {"ours", "transformers"}
    assert len(trials) == 4
    assert notes[-1].startswith("llama.cpp is left out from round 0 on: llama.cpp: answered 400")


@pytest.mark.slow
async def test_where_no_server_is_left_ours_is_not_measured_either() -> None:
    ends = replace(fake("llama.cpp"), command=[sys.executable, "-c", "raise SystemExit(3)"])

    trials, notes, begun = await in_turns(ends)

    assert (trials, begun) == ([], "llama.cpp")
    assert notes == ["llama.cpp is left out: llama.cpp: did not start (it ended with status 3)"]


@pytest.mark.slow
async def test_turns_that_ended_early_are_noted() -> None:
    _, notes, _ = await in_turns(fake("llama.cpp", "stops early"), rounds=1)

    assert notes[-1] == "llama.cpp ended 6 turns before they had their tokens."


# --- What is installed ----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_not_installed_is_left_out_with_a_note_that_says_how_to_have_it(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # one without packages
    python.chmod(0o700)

    found = installed_servers(
        WORKLOAD, threads=1, llama_cpp_python=python, transformers_python=python
    )

    assert (found.servers, found.versions) == ([], {})
    of_llama_cpp, of_transformers = found.notes
    assert of_llama_cpp.startswith("llama.cpp server is left out: ")
    assert "has no llama_cpp, fastapi" in of_llama_cpp
    assert "pip install 'llama-cpp-python[server]'" in of_llama_cpp
    assert "--llama-cpp-python" in of_llama_cpp
    assert "pip install 'transformers[serving]'" in of_transformers
    assert "--transformers-python" in of_transformers


def test_an_interpreter_that_is_not_there_is_noted(tmp_path: Path) -> None:
    nowhere = tmp_path / "python"

    found = installed_servers(
        WORKLOAD, threads=1, llama_cpp_python=nowhere, transformers_python=nowhere
    )

    assert found.servers == []
    assert all(f"{nowhere} cannot be asked what it has" in note for note in found.notes)


# --- The real ones --------------------------------------------------------------------------------


def named_python(variable: str) -> Path | None:
    return Path(os.environ[variable]) if variable in os.environ else None


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_real_servers_hold_a_run_and_find_its_prefix_in_their_caches(
    concurrency: int,
) -> None:
    llama_cpp, transformers = map(named_python, ("LLAMA_CPP_PYTHON", "TRANSFORMERS_PYTHON"))
    if llama_cpp is None and transformers is None:
        pytest.skip("neither LLAMA_CPP_PYTHON nor TRANSFORMERS_PYTHON names an interpreter")
    workload = Workload("2 calls", TRACE, concurrency)
    found = installed_servers(
        workload, threads=2, llama_cpp_python=llama_cpp, transformers_python=transformers
    )
    trials: list[Trial] = []

    notes = await measure_baselines(
        found.servers,
        workload,
        range(1),
        experiment="e",
        x=2,
        threads=2,
        numbers=Numbers(),
        taken=trials.append,
    )

    assert len(trials) == len(found.servers) > 0
    assert notes == [note for server in found.servers for note in server.notes]
    for run in (run for trial in trials for run in trial.runs):
        assert [turn.output_tokens for turn in run.turns] == [s.output_tokens for s in steps()]
        for earlier, later in itertools.pairwise(run.turns):
            assert later.cached_tokens >= earlier.input_tokens - 16  # a page of transformers
