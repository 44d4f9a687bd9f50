"""A server without a model says so, and is a server in all else."""

from sampler.engines.simulated.model import simulated_model
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from tests.server.running import calls_in, output, serving

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
