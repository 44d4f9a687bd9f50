"""An outside server that runs, and the agent runs that are held on it.

What it tells of itself is little: tokens in the last chunk, if that, and reused prefixes in its
log. The rest is measured from here.
"""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import httpx2
import msgspec
from msgspec import Struct

from scripts.benchmarks.served import Served
from scripts.comparison import results
from scripts.comparison.outside_servers import BaselineError, OutsideServer
from scripts.comparison.outside_steps import Step
from scripts.comparison.results import AgentRun, Trial

_START_SECONDS = 300.0
_STOP_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
_TAIL_LINES = 8


class RunningServer:
    """A server that listens."""

    def __init__(
        self, server: OutsideServer, process: "subprocess.Popen[str]", log: Path, port: int
    ) -> None:
        self.name = server.name
        self.pid = process.pid
        self.num_short_turns = 0
        """How many turns ended before they had the tokens that they were to have."""
        self._server = server
        self._process = process
        self._served = Served(process)
        self._log = log
        self._url = f"http://127.0.0.1:{port}"
        self._num_read = len(_written(log))

    async def measure(self, runs: Sequence[Sequence[Step]], **labels: Any) -> Trial:
        """Hold ``runs`` at once, and return the trial; ``labels`` are members that it is given.

        Raises:
            BaselineError: a request was refused or broken off; the other runs are given up too.
        """
        cpu_before, began_at = self._served.cpu_seconds(), time.perf_counter()
        held = await self._hold_all(runs)
        seconds = time.perf_counter() - began_at
        cpu_seconds = self._served.cpu_seconds() - cpu_before
        answers = [answer for run in held for answer in run.answers]
        self._find_cached_tokens(answers)
        self.num_short_turns += sum(answer.is_short for answer in answers)
        return Trial(
            engine=self._server.engine,
            design=self.name,
            concurrency=len(runs),
            runs=[run.result() for run in held],
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            counts={},
            loop_lag={},
            **labels,
        )

    def stop(self) -> None:
        """End the process, if it has not ended."""
        _stop(self._process)

    async def _hold_all(self, runs: Sequence[Sequence[Step]]) -> list["_Run"]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._hold(steps)) for steps in runs]
        except* BaselineError as errors:
            first = errors.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise first

    async def _hold(self, steps: Sequence[Step]) -> "_Run":
        run = _Run()
        began_at = time.perf_counter()
        async with httpx2.AsyncClient(
            base_url=self._url, timeout=_PATIENCE_SECONDS, trust_env=False
        ) as client:
            for step in steps:
                run.answers.append(await self._answer(client, step))
                calls_at = time.perf_counter()
                await asyncio.sleep(step.tool_seconds)
                run.tool_seconds.append(time.perf_counter() - calls_at)
        run.wall_seconds = time.perf_counter() - began_at
        return run

    async def _answer(self, client: httpx2.AsyncClient, step: Step) -> "_Answer":
        try:
            return await _ask(client, self._server, step)
        except (BaselineError, httpx2.HTTPError) as error:
            what = str(error) or type(error).__name__
            raise BaselineError(f"{self.name}: {what}{_last_words(self._log)}") from error

    def _find_cached_tokens(self, answers: Iterable["_Answer"]) -> None:
        """Read them from the log; where nothing is written of a request, there were none."""
        written = _written(self._log)
        matches = list(self._server.prefix_match.finditer(written, self._num_read))
        self._num_read = len(written)
        for answer in sorted(answers, key=lambda answer: answer.began_at):
            if match := next(filter(answer.is_meant, matches), None):
                answer.cached_tokens = int(match["cached"])
                matches.remove(match)


@asynccontextmanager
async def running(
    server: OutsideServer, threads: int, patience_seconds: float = _START_SECONDS
) -> AsyncIterator[RunningServer]:
    """Run ``server`` with so many threads, and give it when it is ready; stop it in the end.

    Raises:
        BaselineError: it ended, or was not ready in time.
    """
    with TemporaryDirectory(prefix="suspended-sampling-") as folder:
        log = Path(folder, "log")
        process = _started(server, threads, log)
        try:
            yield await _ready(server, process, log, patience_seconds)
        finally:
            _stop(process)


def _started(server: OutsideServer, threads: int, log: Path) -> "subprocess.Popen[str]":
    """Start it in a process group of its own: Ctrl-C reaches us alone, and we stop it."""
    with log.open("wb") as file:
        return subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            text=True,
            env=_environment(server, threads),
            process_group=0,
        )


# llama_cpp.server would take these for options of its own.
_OPTIONS = ("HOST", "PORT", "CONFIG_FILE")


def _environment(server: OutsideServer, threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _OPTIONS}
    fixed = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return {**server.environment, **inherited, **fixed}


async def _ready(
    server: OutsideServer, process: "subprocess.Popen[str]", log: Path, patience_seconds: float
) -> RunningServer:
    try:
        async with asyncio.timeout(patience_seconds):
            port = await _port(process, log)
            await _until_healthy(process, port)
    except TimeoutError:
        why = f"{server.name}: not ready after {patience_seconds:g} s"
        raise BaselineError(why + _last_words(log)) from None
    except BaselineError as error:
        raise BaselineError(f"{server.name}: {error}{_last_words(log)}") from None
    return RunningServer(server, process, log, port)


_LISTENS = re.compile(r"Uvicorn running on http://[^\s:]+:(\d+)")


async def _port(process: "subprocess.Popen[str]", log: Path) -> int:
    while (listens := _LISTENS.search(_written(log))) is None:
        _check_runs(process)
        await asyncio.sleep(_LOOK_SECONDS)
    return int(listens[1])


async def _until_healthy(process: "subprocess.Popen[str]", port: int) -> None:
    async with httpx2.AsyncClient(trust_env=False, timeout=_PATIENCE_SECONDS) as client:
        while not await _is_healthy(client, port):
            _check_runs(process)
            await asyncio.sleep(_LOOK_SECONDS)


async def _is_healthy(client: httpx2.AsyncClient, port: int) -> bool:
    try:
        reply = await client.get(f"http://127.0.0.1:{port}/v1/models")
    except httpx2.TransportError:
        return False
    return reply.status_code == httpx2.codes.OK


def _check_runs(process: "subprocess.Popen[str]") -> None:
    if process.poll() is not None:
        raise BaselineError(f"did not start (it ended with status {process.returncode})")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _written(log: Path) -> str:
    return log.read_text(errors="replace")


def _last_words(log: Path) -> str:
    lines = _written(log).splitlines()[-_TAIL_LINES:]
    return "".join(f"\n    {line[:200]}" for line in lines)


# --- One request ----------------------------------------------------------------------------------


class _Delta(Struct, frozen=True):
    content: str | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_DATA = "data: "


@dataclass
class _Answer:
    """What came of one request."""

    step: Step
    request_id: str
    began_at: float
    """As all times in seconds, by ``time.perf_counter``."""
    bytes_sent: int
    bytes_received: int = 0
    first_text_at: float | None = None
    ended_at: float = 0.0
    finish_reason: str | None = None
    num_texts: int = 0
    usage: _Usage | None = None
    cached_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """As the server counts them, if it tells."""
        return self.step.input_tokens if self.usage is None else self.usage.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """The same; where it does not tell, all that were asked for came, or one in each text."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return self.step.output_tokens if self.finish_reason == "length" else self.num_texts

    @property
    def is_short(self) -> bool:
        """Whether fewer tokens came than were asked for."""
        return self.output_tokens < self.step.output_tokens

    def take(self, chunk: _Chunk) -> None:
        """Take note of a chunk.

        Raises:
            BaselineError: it says that the server failed.
        """
        if chunk.error is not None:
            raise BaselineError(f"failed in the middle of a turn: {chunk.error}")
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.delta.content:
                self.num_texts += 1
                self.first_text_at = self.first_text_at or time.perf_counter()

    def is_meant(self, match: re.Match[str]) -> bool:
        """Return whether what was written about a reused prefix is about this request."""
        told = match.groupdict()
        if "request" in told:
            return told["request"] == self.request_id
        return int(told["cached"]) + int(told["rest"]) == self.input_tokens

    def turn(self, tool_seconds: float) -> results.Turn:
        """Return what is kept of it."""
        return results.Turn(
            seconds=self.ended_at - self.began_at,
            first_event_seconds=(self.first_text_at or self.ended_at) - self.began_at,
            first_token_seconds=None,
            split=None,
            tool_seconds=tool_seconds,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            # The last one sampled is not read.
            tokens_forwarded=self.input_tokens - self.cached_tokens + self.output_tokens - 1,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
        )


async def _ask(client: httpx2.AsyncClient, server: OutsideServer, step: Step) -> _Answer:
    began_at = time.perf_counter()
    body = {"model": server.model, "messages": step.messages, "stream": True, "temperature": 0}
    content = msgspec.json.encode(body | server.members(step.output_tokens))
    answer = _Answer(step, str(uuid4()), began_at, len(content))
    headers = {"Content-Type": "application/json", "X-Request-ID": answer.request_id}
    async with client.stream(
        "POST", "/v1/chat/completions", content=content, headers=headers
    ) as reply:
        if reply.status_code != httpx2.codes.OK:
            said = (await reply.aread()).decode(errors="replace")
            raise BaselineError(f"answered {reply.status_code}: {said[:400]}")
        async for line in reply.aiter_lines():
            if line.startswith(_DATA) and line != "data: [DONE]":
                answer.take(_chunk(line.removeprefix(_DATA)))
        answer.bytes_received = reply.num_bytes_downloaded
    answer.ended_at = time.perf_counter()
    if answer.finish_reason is None:
        raise BaselineError("the stream ended before the turn did")
    return answer


def _chunk(data: str) -> _Chunk:
    try:
        return _CHUNK.decode(data)
    except msgspec.DecodeError as error:
        raise BaselineError(f"expected a chunk of a chat completion, got {data[:400]}") from error


@dataclass
class _Run:
    """An agent run, as far as it has got."""

    answers: list[_Answer] = field(default_factory=list)
    tool_seconds: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0

    def result(self) -> AgentRun:
        """Return what is kept of it."""
        return AgentRun(
            seconds=self.wall_seconds - sum(self.tool_seconds),
            wall_seconds=self.wall_seconds,
            turns=[
                answer.turn(seconds)
                for answer, seconds in zip(self.answers, self.tool_seconds, strict=True)
            ],
        )
