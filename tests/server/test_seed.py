"""The seed decides what is sampled, and is told."""

from server.settings import Settings
from tests.server.models import OSLO
from tests.server.running import Client, Event, calls_in, output, serving, text_in
from tests.tiny_model import tiny_engine


async def sample(client: Client, **members: object) -> Event:
    """Return a response of a model that is not scripted, in full temperature."""
    events = await client.create(tools=[], max_output_tokens=12, **members)
    response: Event = events[-1]["response"]
    return response


async def test_the_same_seed_gives_the_same_text() -> None:
    async with serving(engine=tiny_engine()) as server, server.connect() as client:
        first = await sample(client, seed=7)
        second = await sample(client, seed=7)
        other = await sample(client, seed=8)

        assert text_in(first) == text_in(second) != text_in(other)


async def test_the_same_seed_gives_the_same_text_over_http() -> None:
    body = {"input": "Is it dry in Oslo?", "max_output_tokens": 12, "seed": 7}
    async with serving(engine=tiny_engine()) as server:
        async with server.http() as http, server.connect() as client:
            over_http = (await http.post("/v1/responses", json=body)).json()
            over_socket = await sample(client, seed=7)

        assert text_in(over_http) == text_in(over_socket)


async def test_the_seed_is_told() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        response = (await client.create(seed=2**63 - 1))[-1]["response"]

        assert response["suspend:run"]["seed"] == 2**63 - 1


async def test_the_seed_holds_for_the_whole_run() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        first = await client.create(seed=7)
        last = await client.append(output(calls_in(first)[0]))

        assert last[-1]["response"]["suspend:run"]["seed"] == 7


async def test_a_request_without_seed_is_given_a_fresh_one() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        seeds = {(await client.create())[-1]["response"]["suspend:run"]["seed"] for _ in range(3)}

        assert len(seeds) == 3


async def test_the_operators_seed_is_the_default() -> None:
    async with serving("Sun.", settings=Settings(seed=0)) as server, server.connect() as client:
        default = (await client.create())[-1]["response"]
        own = (await client.create(seed=5))[-1]["response"]

        assert default["suspend:run"]["seed"] == 0
        assert own["suspend:run"]["seed"] == 5
