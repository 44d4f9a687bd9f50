"""A process that shows what is below the server, and what happens inside it.

It is the server's application under the server's configuration, on the same simulated model, with
these paths beside it, each a WebSocket that takes requests for so many tokens:

*   ``/bare`` encodes and sends an event for each token, and does nothing else; with ``seconds``
    they come from another thread, so far apart, as from a model.
*   ``/engine`` has the engine sample, and sends nothing.
*   ``/model`` has the model take the steps of so many ``streams``, without an engine.
*   ``/noted`` tells what was noted since it was last asked.

What is noted: when each token was there, in the thread that brought it; and for each segment that
resumed a run, how long it took from the append received to the chunk handed to the model, and to
the step that begins with it. Neither can be seen from outside. It costs a little, so what the
server takes is measured on the server itself.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import typer
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.codec import encode
from protocol.server_events import OutputTextDelta
from sampler.cache_pool import blocks_for
from sampler.engine import ToolCaller
from sampler.engines.simulated.model import SMOLLM2_KV, simulated_model
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner, Piece, RunnerWrapper
from sampler.outputs import Output, SegmentEnded
from sampler.run import Run
from sampler.sampling import Certain, Logits
from server.app import create_app
from server.process import Server, server_config
from server.reading import read_create
from server.settings import Settings

TOOL = "look_up"
_MANY_CALLS = 1000
_LAST_EVENT = '{"type":"response.completed"}'


def floors_command(rate: float, kv_tokens: int) -> list[str]:
    """Return the command that starts the process.

    Args:
        rate: tokens a second of each sequence; 0 is as fast as can be.
        kv_tokens: of how many there is room for the keys and values.
    """
    options = ["--rate", str(rate), "--kv-tokens", str(kv_tokens)]
    return [sys.executable, "-P", __file__, *options]


def kv_bytes(num_tokens: int) -> int:
    """Return what the keys and values of ``num_tokens`` take, in whole blocks."""
    return blocks_for(num_tokens) * SMOLLM2_KV.block_bytes


@dataclass
class Notes:
    """What cannot be seen from outside. Times are monotonic seconds, durations seconds."""

    token_times: list[float] = field(default_factory=list)
    """When each token was there."""
    handed_after: list[float] = field(default_factory=list)
    """From each append to its chunk handed to the model thread."""
    stepped_after: list[float] = field(default_factory=list)
    """From each append to its first step."""

    def take(self) -> dict[str, list[float]]:
        """Return all of it, and begin anew."""
        taken = {name: list(values) for name, values in vars(self).items()}
        for values in vars(self).values():
            values.clear()
        return taken


class NotingRunner(RunnerWrapper):
    """A runner that notes when a step of its has come to an end."""

    def __init__(self, runner: ModelRunner, notes: Notes) -> None:
        super().__init__(runner)
        self._notes = notes

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Logits | None]:
        logits = self._runner.forward(pieces)
        self._notes.token_times.append(time.monotonic())
        return logits


class NotingEngine(LocalEngine):
    """An engine that notes how long each append took to get to the model."""

    def __init__(self, model: LoadedModel, notes: Notes) -> None:
        super().__init__(model)
        self._notes = notes

    async def sample(
        self, run: Run, call_tools: ToolCaller | None = None
    ) -> AsyncGenerator[Output, None]:
        async with aclosing(super().sample(run, call_tools)) as outputs:
            async for output in outputs:
                if isinstance(output, SegmentEnded) and len(run.segments) > 1:
                    segment = output.segment
                    assert segment.handed_at is not None, "it was sampled"
                    assert segment.started_at is not None, "it was sampled"
                    self._notes.handed_after.append(segment.handed_at - segment.requested_at)
                    self._notes.stepped_after.append(segment.started_at - segment.requested_at)
                yield output


class Floors:
    """The server's application, with the floors beside it."""

    def __init__(self, engine: LocalEngine, settings: Settings, notes: Notes) -> None:
        self.app = create_app(engine, settings)
        self._services = self.app.state.services
        self._engine = engine
        self._notes = notes
        self._paths = {
            "/bare": self._bare,
            "/engine": self._drain,
            "/model": self._step,
            "/noted": self._tell,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        answer = self._paths.get(scope.get("path", "")) if scope["type"] == "websocket" else None
        if answer is None:
            await self.app(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await answer(json.loads(message["text"]), send)
            await _send_text(send, _LAST_EVENT)

    async def _bare(self, request: dict[str, Any], send: Send) -> None:
        index = 0
        async for _ in self._ticks(request["max_output_tokens"], request.get("seconds", 0.0)):
            event = OutputTextDelta(
                sequence_number=index,
                item_id="msg_0123456789abcdef0123456789abcdef",
                output_index=0,
                content_index=0,
                delta=" harbour",
                obfuscation="0123456789",
            )
            await _send_text(send, encode(event).decode())
            index += 1

    async def _ticks(self, number: int, seconds: float) -> AsyncGenerator[None, None]:
        """Give ``number`` ticks; those that are apart are noted."""
        if not seconds:
            for _ in range(number):
                yield
            return
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[None]()

        def bring() -> None:
            for _ in range(number):
                time.sleep(seconds)
                self._notes.token_times.append(time.monotonic())
                loop.call_soon_threadsafe(arrived.put_nowait, None)

        threading.Thread(target=bring, daemon=True).start()
        for _ in range(number):
            await arrived.get()
            yield

    async def _drain(self, request: dict[str, Any], send: Send) -> None:
        """Have sampled what the server would be asked for in the same words."""
        memory, pre_inference = self._services.connection_memory(""), self._services.pre_inference
        work = self._services.new_work()
        params = read_create(request, memory, work, "websocket")
        prepared = await pre_inference.prepare(params, memory, work)
        assert prepared.run is not None, "it is not a warm-up"
        async with aclosing(self._engine.sample(prepared.run)) as outputs:
            async for _ in outputs:
                pass

    async def _step(self, request: dict[str, Any], send: Send) -> None:
        """Have the model say what it is made to, with nobody there to take it."""
        tokens, streams = request["max_output_tokens"], request["streams"]
        await asyncio.to_thread(take_steps, self._engine.model.runner, tokens, streams)

    async def _tell(self, request: dict[str, Any], send: Send) -> None:
        await _send_text(send, json.dumps(self._notes.take()))


def take_steps(runner: ModelRunner, num_tokens: int, num_rows: int) -> None:
    """Decode ``num_tokens`` in each of ``num_rows`` sequences, on a runner that is simulated."""
    caches = [runner.new_cache() for _ in range(num_rows)]
    token_ids = [1] * num_rows
    for _ in range(num_tokens):
        pieces = [Piece((one,), cache) for one, cache in zip(token_ids, caches, strict=True)]
        said = runner.forward(pieces)
        token_ids = [one.token_id for one in said if isinstance(one, Certain)]


def script() -> Script:
    """Return one that begins as the server's: a call, then words without end. Whoever has had
    these makes calls from then on."""
    begins = Script.of_calls(1, TOOL, num_words=1 << 20).turns
    return Script((*begins, *begins[:1] * _MANY_CALLS))


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "websocket.send", "text": text})


def main(
    rate: Annotated[float, typer.Option()],
    kv_tokens: Annotated[int, typer.Option()],
) -> None:
    """Serve until told to end; say where on standard output."""
    torch.set_num_threads(1)
    notes = Notes()
    loaded = simulated_model(
        rate or None,
        script=script(),
        kv_format=SMOLLM2_KV,
        kv_memory=kv_bytes(kv_tokens),
    )
    if rate:  # with no pace of its own nobody asks when its tokens were there
        loaded = replace(loaded, runner=NotingRunner(loaded.runner, notes))
    engine = NotingEngine(loaded, notes) if rate else LocalEngine(loaded)
    settings = Settings(store=False, ledger=False)
    floors = Floors(engine, settings, notes)
    app: ASGIApp = floors
    try:
        config = server_config(app, settings, port=0)
        Server(config, floors.app.state.draining, drain_seconds=0).run()
    finally:
        engine.close()


if __name__ == "__main__":
    typer.run(main)
