"""A server without a model says so wherever it says anything, and is a server in all else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import decode_object
from sampler.engines.simulated.model import simulated_model
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from server.ledger import read_totals
from server.settings import Settings
from tests.server.running import Running, calls_in, output, serving, text_in

ALIAS = "gpt-5-codex"
MODELS = f"""
default = "{ALIAS}"
[model.{ALIAS}]
of = "simulated-unlimited"
[price.{ALIAS}]
input = 1
output = 8
"""

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


async def test_every_response_of_a_simulated_model_says_that_it_is_one() -> None:
    model = simulated_model(script=Script.of_calls(1, "look", num_words=5), kv_memory=1 << 20)
    async with serving(engine=LocalEngine(model)) as server, server.connect("append") as client:
        suspended = await client.create(input="Look.", tools=[TOOL])
        ended = await client.append(output(calls_in(suspended)[0], "a tree"))

        for response in (suspended[-1]["response"], ended[-1]["response"]):
            assert response["model"] == "simulated-unlimited"
            assert response["suspend:run"]["simulated"] is True
        assert ended[-1]["type"] == "response.completed"
        assert ended[-1]["response"]["suspend:run"]["tokens_reforwarded"] == 0


@asynccontextmanager
async def disguised(tmp_path: Path) -> AsyncIterator[Running]:
    """Serve one under a name that has a price, and does not say what it is."""
    path = tmp_path / "models.toml"
    path.write_text(MODELS, encoding="utf-8")
    settings = Settings(
        models_file=path, data_dir=tmp_path, recent_responses=0, store=True, ledger=True
    )
    engine = LocalEngine(simulated_model(script=Script.of_calls(0, "look"), kv_memory=1 << 20))
    async with serving(engine=engine, settings=settings) as server:
        yield server


def is_marked(response: dict[str, Any]) -> bool:
    return bool(response["suspend:run"]["simulated"])


@pytest.mark.parametrize("members", [{}, {"generate": False}], ids=["sampled", "warmed up"])
async def test_a_response_says_so_from_its_first_event_on(
    members: dict[str, Any], tmp_path: Path
) -> None:
    async with disguised(tmp_path) as server, server.connect() as client:
        events = await client.create(model=ALIAS, store=False, **members)

    responses = [event["response"] for event in events if "response" in event]
    assert len(responses) == 3
    assert all(is_marked(response) for response in responses)


async def test_a_response_in_the_background_says_so_before_its_turn_comes(tmp_path: Path) -> None:
    async with disguised(tmp_path) as server, server.http() as http:
        queued = (await http.post("/v1/responses", json={"input": "x", "background": True})).json()
        streamed = await http.post(
            "/v1/responses", json={"input": "x", "background": True, "stream": True}
        )
        found = (await http.get(f"/v1/responses/{queued['id']}")).json()

    events = [
        decode_object(line.removeprefix("data: ").encode())
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    responses = [event["response"] for event in events if "response" in event]
    assert [response["status"] for response in responses[:2]] == ["queued", "queued"]
    assert all(is_marked(response) for response in (queued, found, *responses))


async def test_a_conversation_that_it_compacted_says_so(tmp_path: Path) -> None:
    async with disguised(tmp_path) as server, server.http() as http:
        compacted = await http.post(
            "/v1/responses/compact", json={"model": ALIAS, "input": "It is dry in Oslo."}
        )

    assert is_marked(compacted.json())


async def test_a_list_of_models_says_so(tmp_path: Path) -> None:
    async with disguised(tmp_path) as server, server.http() as http:
        listed = (await http.get("/v1/models")).json()["data"]
        one = (await http.get(f"/v1/models/{ALIAS}")).json()

    assert {model["id"] for model in listed} == {ALIAS, "simulated-unlimited"}
    assert all(model["suspend:simulated"] is True for model in (*listed, one))


async def test_metrics_say_so(tmp_path: Path) -> None:
    async with disguised(tmp_path) as server, server.http() as http:
        text = (await http.get("/metrics")).text

    assert 'suspend_model_info{name="simulated-unlimited",simulated="true"} 1.0' in text


async def test_the_books_say_so(tmp_path: Path) -> None:
    async with disguised(tmp_path) as server, server.http() as http:
        await http.post("/v1/responses", json={"input": "x"})
        await http.post("/v1/responses/compact", json={"model": ALIAS, "input": "x"})

    [total] = read_totals(tmp_path)
    assert total.model == ALIAS
    assert total.is_simulated
    assert total.num_runs == 2
    assert total.cost_nanodollars


async def test_a_server_with_a_model_says_nothing_of_the_kind() -> None:
    async with serving("Sun.") as server, server.connect() as client, server.http() as http:
        events = await client.create(store=False)
        [model] = (await http.get("/v1/models")).json()["data"]
        metrics = (await http.get("/metrics")).text

    assert text_in(events[-1]["response"]) == "Sun."
    assert "suspend:run" not in events[0]["response"]
    assert "simulated" not in events[-1]["response"]["suspend:run"]
    assert "suspend:simulated" not in model
    assert 'simulated="false"} 1.0' in metrics
