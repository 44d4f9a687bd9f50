"""Each design's agent holds a trace to its end, and refuses to measure anything else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sampler.traces import Trace, TraceCall, TraceTurn, write_traces
from scripts.comparison.agents import CompareError, Endpoint, Heard, check_is_said, hold
from scripts.comparison.results import AgentRun, Design
from server.settings import Settings
from tests.server.running import TOOL, serving

OSLO = TraceCall(name="get_weather", arguments='{"city": "Oslo"}', output="rain", seconds=0.01)
BERGEN = TraceCall(name="get_weather", arguments='{"city": "Bergen"}', output="rain", seconds=0.03)
TRACE = Trace(
    name="weather",
    instructions="Be brief.",
    tools=(TOOL,),
    input="Is it dry?",
    turns=(
        TraceTurn(text="Let me look.", calls=(OSLO, BERGEN)),
        TraceTurn(calls=(BERGEN,)),
        TraceTurn(text="Rain."),
    ),
)


@pytest.fixture
def replayed(tmp_path: Path) -> Settings:
    """Settings of a server that can replay the trace, and keeps what it has computed."""
    write_traces(tmp_path / "traces.jsonl", [TRACE])
    return Settings(recent_responses=64, store=False, replay_files=(tmp_path / "traces.jsonl",))


async def held(design: Design, settings: Settings, trace: Trace = TRACE) -> AgentRun:
    async with serving(settings=settings) as running:
        return await hold(design, Endpoint(running.url, "tiny"), trace)


@pytest.mark.parametrize("design", Design)
async def test_a_trace_is_held_to_its_end_in_each_design(
    design: Design, replayed: Settings
) -> None:
    run = await held(design, replayed)

    assert len(run.turns) == 3
    for turn in run.turns:
        assert turn.split is not None
        parts = msgspec.structs.astuple(turn.split)
        assert sum(parts) == pytest.approx(turn.seconds)
        assert 0 < turn.first_event_seconds <= turn.seconds
        assert turn.output_tokens > 0
        assert turn.bytes_sent > 0
        assert turn.bytes_received > 0


@pytest.mark.parametrize("design", Design)
async def test_all_designs_sample_the_same(design: Design, replayed: Settings) -> None:
    async with serving(settings=replayed) as running:
        endpoint = Endpoint(running.url, "tiny")
        run, suspended = [await hold(each, endpoint, TRACE) for each in (design, Design.SUSPENDED)]

    for turn, wanted in zip(run.turns, suspended.turns, strict=True):
        assert turn.input_tokens == wanted.input_tokens
        assert turn.output_tokens == wanted.output_tokens


async def test_only_a_stateless_client_sends_what_was_said(replayed: Settings) -> None:
    stateless = await held(Design.STATELESS_CACHE, replayed)
    suspended = await held(Design.SUSPENDED, replayed)

    assert stateless.turns[2].bytes_sent > stateless.turns[1].bytes_sent
    assert suspended.turns[1].bytes_sent < suspended.turns[0].bytes_sent


async def test_without_caches_all_is_forwarded_again(replayed: Settings) -> None:
    cached = await held(Design.STATELESS_CACHE, replayed)
    forgetting = await held(Design.STATELESS, replayed)

    assert cached.turns[2].cached_tokens > 0
    assert [turn.cached_tokens for turn in forgetting.turns] == [0, 0, 0]


async def test_tools_of_a_turn_run_side_by_side_and_are_not_counted(replayed: Settings) -> None:
    run = await held(Design.SUSPENDED, replayed)

    slept = [turn.tool_seconds for turn in run.turns]
    assert 0.03 <= slept[0] < 0.04
    assert slept[2] < 0.03
    assert run.seconds == pytest.approx(run.wall_seconds - sum(slept))


@pytest.mark.parametrize(
    "design", [Design.SUSPENDED, Design.SUSPENDED_INJECT, Design.CHAINED, Design.STATELESS_CACHE]
)
async def test_another_text_than_the_trace_has_fails(design: Design, replayed: Settings) -> None:
    turns = (*TRACE.turns[:2], TraceTurn(text="Sun."))
    other = msgspec.structs.replace(TRACE, turns=turns)

    with pytest.raises(CompareError, match=r"turn 2: expected the text 'Sun.', got 'Rain.'"):
        await held(design, replayed, other)


async def test_another_call_than_the_trace_has_fails(replayed: Settings) -> None:
    turns = (TRACE.turns[0], TraceTurn(calls=(OSLO,)), TRACE.turns[2])
    other = msgspec.structs.replace(TRACE, turns=turns)

    with pytest.raises(CompareError, match=r"turn 1: expected the calls .*Oslo.* got .*Bergen"):
        await held(Design.SUSPENDED, replayed, other)


@pytest.mark.parametrize("design", [Design.SUSPENDED, Design.STATELESS])
async def test_what_the_server_refuses_is_said(design: Design, replayed: Settings) -> None:
    unknown = msgspec.structs.replace(TRACE, name="wether")

    with pytest.raises(CompareError, match=f"^{design}, wether: .*'wether'"):
        await held(design, replayed, unknown)


@pytest.mark.parametrize("design", [Design.SUSPENDED, Design.STATELESS])
async def test_a_server_that_is_gone_is_an_error(design: Design, replayed: Settings) -> None:
    async with serving(settings=replayed) as running:
        endpoint = Endpoint(running.url, "tiny")

    with pytest.raises(CompareError, match="weather: Connect"):
        await hold(design, endpoint, TRACE)


@pytest.mark.parametrize(
    ("design", "num_connections"),
    [
        (Design.STATELESS_CACHE, 1),
        (Design.STATELESS, 1),
        (Design.STATELESS_CACHE_RECONNECT, 3),
        (Design.STATELESS_RECONNECT, 3),
        (Design.CHAINED, 1),
        (Design.SUSPENDED, 1),
    ],
)
async def test_connections_are_kept_or_opened_anew(
    design: Design, num_connections: int, replayed: Settings
) -> None:
    async with serving(settings=replayed) as running, counted(running.port) as door:
        await hold(design, Endpoint(f"http://127.0.0.1:{door.port}", "tiny"), TRACE)

    assert door.num_opened == num_connections


class Door:
    """What connections come through, and are counted."""

    def __init__(self, inner_port: int) -> None:
        self.port = 0
        self.num_opened = 0
        self.open: set[asyncio.Task[None] | None] = set()
        self._inner_port = inner_port

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what one connection brings, both ways, until both sides have ended."""
        self.num_opened += 1
        self.open.add(asyncio.current_task())
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(reader, inner_writer))
            tasks.create_task(_copy(inner_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def counted(port: int) -> AsyncIterator[Door]:
    """Open a door to ``port``. On the way out all that came through is gone."""
    door = Door(port)
    async with await asyncio.start_server(door.pass_on, "127.0.0.1", 0) as listener:
        door.port = listener.sockets[0].getsockname()[1]
        yield door
        await asyncio.gather(*filter(None, door.open))


# --- What is heard -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"type": "error", "error": {"message": "too many"}}, "refused: too many"),
        (
            {"type": "response.failed", "response": {"error": {"message": "no memory"}}},
            "response.failed: .*no memory",
        ),
        (
            {
                "type": "response.incomplete",
                "response": {"error": None, "incomplete_details": {"reason": "content_filter"}},
            },
            "response.incomplete: .*content_filter",
        ),
        ({"type": "response.inject.failed", "error": {"code": "gone"}}, "gone"),
    ],
)
def test_a_turn_that_does_not_end_well_is_an_error(event: dict[str, Any], message: str) -> None:
    with pytest.raises(CompareError, match=message):
        Heard(sent_at=0.0).take(event)


def cut_by(reason: str) -> dict[str, Any]:
    response = {"error": None, "incomplete_details": {"reason": reason}}
    return {"type": "response.incomplete", "response": response}


def test_a_turn_may_be_cut_where_that_is_expected() -> None:
    heard = Heard(sent_at=0.0, may_be_cut=True)

    heard.take(cut_by("max_output_tokens"))

    assert heard.response == cut_by("max_output_tokens")["response"]
    with pytest.raises(CompareError, match="content_filter"):
        Heard(sent_at=0.0, may_be_cut=True).take(cut_by("content_filter"))
    with pytest.raises(CompareError, match="max_output_tokens"):
        Heard(sent_at=0.0).take(cut_by("max_output_tokens"))


def test_a_call_that_was_cut_short_is_none() -> None:
    heard = Heard(sent_at=0.0)
    for status in ("completed", "incomplete"):
        item = {"type": "function_call", "status": status}
        heard.take({"type": "response.output_item.done", "item": item})

    assert [call["status"] for call in heard.calls] == ["completed"]


def test_what_announces_a_response_says_nothing_yet() -> None:
    heard = Heard(sent_at=0.0)

    heard.take({"type": "response.created", "response": {"id": "resp_1"}})

    assert heard.first_event_at is None
    assert heard.response_id == "resp_1"


def test_custom_tools_and_namespaces_are_told_apart() -> None:
    turn = TraceTurn(
        calls=(
            TraceCall(name="files.read", arguments="{}", output=""),
            TraceCall(name="patch", input="+ line", output=""),
        )
    )
    read = {"type": "function_call", "namespace": "files", "name": "read", "arguments": "{}"}
    patch = {"type": "custom_tool_call", "name": "patch", "input": "+ line"}

    check_is_said(turn, [read, patch], 0)

    with pytest.raises(CompareError, match="expected the calls"):
        check_is_said(turn, [read | {"namespace": None}, patch], 0)
