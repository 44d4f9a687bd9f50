"""One agent run with many tool calls, held in two ways on one server: suspended, and stateless.

Suspended is one WebSocket in the append dialect. Stateless is one ``POST /v1/responses`` for each
segment, with the whole history, as server-sent events over a connection that is kept alive; it has
no prefix cache, so it shows what a forgetting server does. Model, process, tools and questions are
the same, each call is forced, and sampling is greedy, so both sample the same number of tokens.

Resume latency is the server's own figure, from the tool's output received to the first new token:
no event tells a client of the tokens that only begin a call.
"""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.figures import Figure, figure, ratio
from scripts.benchmarks.section import Grid, Section
from scripts.local_server import running_server, server_command, socket_url

JsonObject = dict[str, Any]

CLOSING = ("response.done", "response.completed", "response.incomplete")
TOOL = {
    "type": "function",
    "name": "roll",
    "description": "Roll a number of dice",
    "parameters": {
        "type": "object",
        "properties": {"dice": {"type": "integer", "minimum": 1, "maximum": 6}},
        "required": ["dice"],
    },
}
QUESTION = {"role": "user", "content": "Roll some dice, again and again, then say what came."}


class DesignsError(RuntimeError):
    """The server refused or failed a segment."""


@dataclass
class Held:
    """What one way of holding the run cost."""

    seconds: float = 0.0
    bytes_sent: int = 0
    resume_seconds: list[float] = field(default_factory=list)
    tokens_sampled: int = 0
    tokens_forwarded: float = 0.0
    encodes: float = 0.0
    pre_inference: float = 0.0


@dataclass(frozen=True)
class Workload:
    """How many calls, and how long their outputs are."""

    calls: int
    result_characters: int

    def tool_choice(self, segment: int) -> str:
        """Return what binds a segment: each but the last is made to call."""
        return "required" if segment < self.calls else "none"

    def body(self, **members: Any) -> JsonObject:
        """Return a request body with what both designs have in common."""
        return {
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_output_tokens": 48,
            **members,
        }

    def output_of(self, call: JsonObject, index: int) -> JsonObject:
        """Return the item that answers ``call``."""
        text = f"roll {index}: {index % 6 + 1}. ".ljust(self.result_characters, "x")
        return {"type": "function_call_output", "call_id": call["call_id"], "output": text}


Hold = Callable[[str, Workload, Held], Awaitable[None]]


def run(bench: Bench) -> Section:
    """Measure the section."""
    workload = Workload(bench.pick(10, 2), 200)
    helds = asyncio.run(_measure_all(bench, workload))
    return Section(
        "designs",
        "one run with tool calls, suspended and stateless, on one server",
        [Grid("what holding it costs", rows_of(helds))],
        {**asdict(workload), "server_threads": "its own" if bench.url else bench.threads},
    )


async def _measure_all(bench: Bench, workload: Workload) -> dict[str, list[Held]]:
    if bench.url is not None:
        return await _in_turns(bench, workload, bench.url)
    options = ["--recent-responses", "0", "--threads", str(bench.threads)]
    async with running_server(server_command(options)) as url:
        return await _in_turns(bench, workload, url)


async def _in_turns(bench: Bench, workload: Workload, url: str) -> dict[str, list[Held]]:
    await measure(hold_suspended, url, Workload(1, 10))  # warm up
    ways: dict[str, Hold] = {
        "suspended": hold_suspended,
        "stateless": hold_stateless,
        "suspended, again": hold_suspended,
    }
    helds: dict[str, list[Held]] = {name: [] for name in ways}
    for _ in range(bench.repeats(3, 1)):
        for name, hold in ways.items():
            helds[name].append(await measure(hold, url, workload))
    return helds


# --- The two designs ------------------------------------------------------------------------------


async def hold_suspended(url: str, workload: Workload, held: Held) -> None:
    """Hold the run on one WebSocket, with an append for each call."""
    async with connect(socket_url(url)) as socket:

        async def events() -> AsyncIterator[JsonObject]:
            async for frame in socket:
                yield json.loads(frame)

        body = workload.body(input=[QUESTION], tool_choice=workload.tool_choice(0))
        frame = json.dumps({"type": "response.create", **body})
        for segment in range(workload.calls + 1):
            await socket.send(frame)
            response = await _read_segment(events(), held, len(frame))
            if segment < workload.calls:
                item = workload.output_of(response["output"][-1], segment)
                choice = workload.tool_choice(segment + 1)
                append = {"type": "response.append", "input": [item], "tool_choice": choice}
                frame = json.dumps(append)


async def hold_stateless(url: str, workload: Workload, held: Held) -> None:
    """Hold the run by requests that each bring the whole history."""
    items: list[JsonObject] = [QUESTION]
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        for segment in range(workload.calls + 1):
            body = workload.body(
                input=items, tool_choice=workload.tool_choice(segment), stream=True
            )
            content = json.dumps(body)
            request = client.stream("POST", "/v1/responses", content=content)
            async with request as reply:
                response = await _read_segment(_sse_events(reply), held, len(content))
            if segment < workload.calls:
                call = response["output"][-1]
                items = [*items, call, workload.output_of(call, segment)]


async def _sse_events(reply: httpx2.Response) -> AsyncIterator[JsonObject]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def _read_segment(
    events: AsyncIterator[JsonObject], held: Held, bytes_sent: int
) -> JsonObject:
    """Read to the closing event, and note what it says of the segment."""
    held.bytes_sent += bytes_sent
    async for event in events:
        if event["type"] in CLOSING:
            response: JsonObject = event["response"]
            held.resume_seconds.append(response["suspend:run"]["time_to_first_token"])
            held.tokens_sampled += response["usage"]["output_tokens"]
            return response
        if event["type"] in ("error", "response.failed"):
            break
    raise DesignsError("the server refused or failed a segment")


# --- What they cost -------------------------------------------------------------------------------

COUNTED = {
    "suspend_tokens_forwarded_total": "tokens_forwarded",
    "suspend_encodes_total": "encodes",
    "suspend_pre_inference_total": "pre_inference",
}


async def _counters(url: str) -> dict[str, float]:
    async with httpx2.AsyncClient(base_url=url) as client:
        text = (await client.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {COUNTED[s.name]: s.value for s in samples if s.name in COUNTED}


async def measure(hold: Hold, url: str, workload: Workload) -> Held:
    """Hold the run once, and say what it cost."""
    held = Held()
    before = await _counters(url)
    started_at = time.perf_counter()
    await hold(url, workload, held)
    held.seconds = time.perf_counter() - started_at
    for name, value in (await _counters(url)).items():
        setattr(held, name, value - before[name])
    # The first segment resumes nothing.
    del held.resume_seconds[0]
    return held


MEASURES: list[tuple[str, str, Callable[[Held], float]]] = [
    ("tokens forwarded", "tokens", lambda held: held.tokens_forwarded),
    ("tokens sampled", "tokens", lambda held: held.tokens_sampled),
    ("texts encoded", "texts", lambda held: held.encodes),
    ("pre-inference", "requests", lambda held: held.pre_inference),
    ("bytes sent", "bytes", lambda held: held.bytes_sent),
    ("resume, median ms", "ms", lambda held: 1000 * statistics.median(held.resume_seconds)),
    ("last resume, ms", "ms", lambda held: 1000 * held.resume_seconds[-1]),
    ("whole run, s", "s", lambda held: held.seconds),
]


def rows_of(helds: dict[str, list[Held]]) -> dict[str, dict[str, Figure]]:
    """Return each measure of each design, and their ratio."""
    rows = {}
    for name, unit, measured in MEASURES:
        row = {way: _figure(held, unit, measured) for way, held in helds.items()}
        if row["suspended"].median:
            row["stateless / suspended"] = ratio(row["stateless"], row["suspended"])
        rows[name] = row
    return rows


def _figure(helds: Sequence[Held], unit: str, measured: Callable[[Held], float]) -> Figure:
    return figure([measured(held) for held in helds], unit)
