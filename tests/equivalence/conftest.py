"""A server on the real embedded model in float32, in this process, so that tests see its tokens."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import uvicorn

from sampler.engine import Engine
from sampler.model_loading import load_model
from sampler.params import SamplingParams, ToolConstraint
from sampler.run import Run
from server.app import create_app
from tests.equivalence.dialogues import Held
from tests.equivalence.reference import UninterruptedLoop


class RecordingEngine(Engine):
    """An engine that remembers its runs."""

    opened: list[Run]

    def open_run(
        self, run_id: str, prompt_ids: Sequence[int], params: SamplingParams, tools: ToolConstraint
    ) -> Run:
        run = super().open_run(run_id, prompt_ids, params, tools)
        self.opened.append(run)
        return run


@dataclass(frozen=True)
class RealServer:
    """A running server and its insides."""

    url: str
    engine: RecordingEngine
    reference: UninterruptedLoop
    held: dict[tuple[str, str], Held] = field(default_factory=dict)
    """What came of dialogues already held, by question and sampling."""

    def run_of(self, response_id: str) -> Run:
        """Return the run behind a response."""
        return next(run for run in self.engine.opened if run.id == response_id)


@pytest.fixture(scope="module")
def real_server() -> Iterator[RealServer]:
    loaded = load_model(device="cpu", dtype="float32")
    assert loaded.runner.dtype == torch.float32
    engine = RecordingEngine(loaded)
    engine.opened = []
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine), port=0, ws="websockets-sansio", log_config=None)
    )
    started = threading.Event()
    server.config.load()
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    while not server.started:
        started.wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield RealServer(f"http://127.0.0.1:{port}", engine, UninterruptedLoop(loaded))
    server.should_exit = True
    thread.join()
    engine.close()
