"""What the benchmarks compare the server with does what it says, and nothing is left out."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from sampler.engines.simulated.model import simulated_model
from sampler.model_loading import LoadedModel
from scripts.benchmarks.floors import Floors, Notes, NotingEngine, NotingRunner, script, take_steps
from scripts.benchmarks.server_cost import words
from server.settings import Settings

pytestmark = pytest.mark.slow


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return simulated_model(script=script(), kv_memory=1 << 24)


@pytest.fixture
def floors(loaded: LoadedModel, notes: Notes) -> Iterator[Floors]:
    noted = LoadedModel(
        loaded.name, NotingRunner(loaded.runner, notes), loaded.tokenizer, loaded.chat_format
    )
    engine = NotingEngine(noted, notes)
    yield Floors(engine, Settings(store=False, ledger=False), notes)
    engine.close()


async def ask(floors: Floors, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a request over a WebSocket and return what comes back."""
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        if message["type"] == "websocket.send":
            sent.append(json.loads(message["text"]))

    for message in (
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": json.dumps(request)},
        {"type": "websocket.disconnect"},
    ):
        incoming.put_nowait(message)
    await floors({"type": "websocket", "path": path}, incoming.get, send)
    return sent


@pytest.mark.parametrize("seconds", [0.0, 0.0001])
async def test_the_bare_application_sends_an_event_for_each_token(
    floors: Floors, notes: Notes, seconds: float
) -> None:
    *deltas, last = await ask(floors, "/bare", {"max_output_tokens": 20, "seconds": seconds})

    assert [event["type"] for event in deltas] == ["response.output_text.delta"] * 20
    assert last["type"] == "response.completed"
    assert len(notes.token_times) == (20 if seconds else 0)


async def test_the_engine_samples_what_is_asked_for_and_sends_nothing(
    floors: Floors, loaded: LoadedModel
) -> None:
    before = loaded.runner.counters.tokens_sampled

    events = await ask(floors, "/engine", words(30))

    assert loaded.runner.counters.tokens_sampled - before == 30
    assert [event["type"] for event in events] == ["response.completed"]


async def test_what_is_noted_is_told_once(floors: Floors, notes: Notes) -> None:
    await ask(floors, "/engine", words(30))

    told, _ = await ask(floors, "/noted", {})
    nothing, _ = await ask(floors, "/noted", {})

    assert len(told["token_times"]) == 30
    assert told["token_times"] == sorted(told["token_times"])
    assert set(map(tuple, nothing.values())) == {()}


def test_steps_are_taken_for_all_rows_at_once(loaded: LoadedModel) -> None:
    counters = loaded.runner.counters
    passes, tokens = counters.forward_passes, counters.tokens_forwarded

    take_steps(loaded.runner, 10, 8)

    assert counters.forward_passes - passes == 10
    assert counters.tokens_forwarded - tokens == 80
