"""Whatever is wrong on a socket is answered, and changes nothing."""

import pytest
import pytest_asyncio

from protocol.codec import encode
from sampler.run import RunState
from server.settings import Settings
from tests.server.models import BOTH, OSLO, held_at, inputs_of, scripted_engine
from tests.server.refusals import (
    BAD_APPENDS,
    BAD_BODIES,
    BAD_FRAMES,
    Refusal,
    body_text,
    refusal,
)
from tests.server.running import (
    BODY,
    Client,
    Event,
    Running,
    calls_in,
    output,
    serving,
    suspended,
    text_in,
)


async def refused(client: Client) -> Refusal:
    """Return what the error frame says that must come next."""
    frame = await client.error()
    assert isinstance(frame["sequence_number"], int)
    return refusal(frame["status"], frame["error"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed() -> list[int]:
    """What the model reads in a run that is suspended and resumed, and nothing else."""
    async with suspended() as (server, client, call):
        await client.append(output(call))
        return inputs_of(server.engine)


async def inputs_of_resumed(server: Running, client: Client, call: Event) -> list[int]:
    """Resume the run, which is suspended still, and return all that the model read."""
    assert [run.state for run in server.engine.runs] == [RunState.SUSPENDED]
    last = await client.append(output(call))
    assert last[-1]["type"] == "response.completed"
    assert text_in(last[-1]["response"]) == "Sun."
    return inputs_of(server.engine)


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_create_is_refused_and_abandons_nothing(
    name: str, undisturbed: list[int]
) -> None:
    body, expected = BAD_BODIES[name]
    async with suspended() as (server, client, call):
        await client.send_raw(body_text(body, type="response.create"))

        assert await refused(client) == expected
        assert await inputs_of_resumed(server, client, call) == undisturbed


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_is_refused_and_changes_nothing(
    name: str, undisturbed: list[int]
) -> None:
    frame, expected = BAD_FRAMES[name]
    async with suspended() as (server, client, call):
        await client.send_raw(frame)

        assert await refused(client) == expected
        assert await inputs_of_resumed(server, client, call) == undisturbed


@pytest.mark.parametrize("name", BAD_APPENDS)
async def test_a_bad_append_is_refused_and_changes_nothing(
    name: str, undisturbed: list[int]
) -> None:
    members, expected = BAD_APPENDS[name]
    async with suspended() as (server, client, call):
        await client.send("response.append", **members)

        assert await refused(client) == expected
        assert await inputs_of_resumed(server, client, call) == undisturbed


async def test_an_append_is_refused_whole_if_one_item_is_wrong(undisturbed: list[int]) -> None:
    async with suspended() as (server, client, call):
        await client.send("response.append", input=[output(call, "wet"), output("call_0")])

        assert await refused(client) == Refusal(400, "unknown_call_id", "input[1].call_id")
        assert await inputs_of_resumed(server, client, call) == undisturbed


async def test_a_call_answered_twice_in_one_append_is_refused(undisturbed: list[int]) -> None:
    async with suspended() as (server, client, call):
        await client.send("response.append", input=[output(call), output(call)])

        assert await refused(client) == Refusal(400, "duplicate_call_id", "input[1].call_id")
        assert await inputs_of_resumed(server, client, call) == undisturbed


async def test_a_call_of_an_earlier_segment_is_not_answered_again() -> None:
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect("append") as client:
        first = calls_in(await client.create())[0]
        second = calls_in(await client.append(output(first)))[0]
        await client.send("response.append", input=[output(first)])
        error = await refused(client)
        last = await client.append(output(second))

        assert error == Refusal(400, "duplicate_call_id", "input[0].call_id")
        assert last[-1]["type"] == "response.completed"


async def test_a_call_of_another_connection_cannot_be_answered() -> None:
    async with suspended() as (server, client, call):
        async with server.connect("append") as other:
            await other.create()
            await other.send("response.append", input=[output(call)])

            assert await refused(other) == Refusal(400, "unknown_call_id", "input[0].call_id")
        last = await client.append(output(call))

        assert text_in(last[-1]["response"]) == "Sun."


async def test_an_append_without_a_suspended_response_is_refused() -> None:
    async with serving("Sun.") as server, server.connect("append") as client:
        await client.send("response.append", input=[output("call_1")])
        error = await refused(client)
        last = await client.create()

        assert error == Refusal(400, "no_suspended_response")
        assert last[-1]["type"] == "response.completed"


async def test_a_call_is_not_answered_again_after_the_end() -> None:
    async with suspended() as (_, client, call):
        await client.append(output(call))
        await client.send("response.append", input=[output(call)])

        assert await refused(client) == Refusal(400, "duplicate_call_id", "input")


async def test_an_append_behind_another_that_answers_the_same_call_is_refused_in_its_turn() -> None:
    async with suspended() as (server, client, call):
        with held_at(1, server.engine) as held:
            await client.send("response.append", input=[output(call)])
            await held.reached.wait()
            await client.send("response.append", input=[output(call)])
            await client.until_taken()
            held.release()
            last = await client.segment()
        error = await refused(client)

        assert last[-1]["type"] == "response.completed"
        assert error == Refusal(400, "duplicate_call_id", "input")


async def test_an_output_that_does_not_fit_the_context_is_refused_and_a_shorter_one_fits(
    undisturbed: list[int],
) -> None:
    async with suspended() as (server, client, call):
        await client.send("response.append", input=[output(call, "a" * 5000)])

        assert await refused(client) == Refusal(400, "context_length_exceeded", "input")
        assert await inputs_of_resumed(server, client, call) == undisturbed


async def test_the_last_output_that_does_not_fit_leaves_the_earlier_ones() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("append") as client:
        oslo, bergen = calls_in(await client.create())
        await client.send("response.append", input=[output(oslo, "dry")])
        await client.send("response.append", input=[output(bergen, "a" * 5000)])
        error = await refused(client)
        last = await client.append(output(bergen, "wet"))

        assert error == Refusal(400, "context_length_exceeded", "input")
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_context_that_fills_up_ends_the_response_incomplete() -> None:
    engine = scripted_engine(OSLO, "Sun." * 300, max_context=300)
    async with suspended(engine=engine) as (_, client, call):
        last = await client.append(output(call))

        assert last[-1]["type"] == "response.incomplete"
        assert last[-1]["response"]["usage"]["total_tokens"] == 300


async def test_a_binary_frame_is_refused(undisturbed: list[int]) -> None:
    async with suspended() as (server, client, call):
        await client.send_raw(b'{"type": "response.create", "input": "Hi"}')

        assert await refused(client) == Refusal(400, "binary_frame")
        assert await inputs_of_resumed(server, client, call) == undisturbed


@pytest.mark.parametrize("text", ["a" * 1000, "☀" * 350], ids=["characters", "bytes"])
async def test_an_oversized_frame_is_refused(text: str, undisturbed: list[int]) -> None:
    async with suspended(settings=Settings(max_frame_bytes=1000)) as (server, client, call):
        await client.send("response.create", input=text)

        assert await refused(client) == Refusal(400, "payload_too_large")
        assert await inputs_of_resumed(server, client, call) == undisturbed


async def test_a_frame_is_measured_in_bytes() -> None:
    frame = encode(BODY | {"type": "response.create", "input": "☀" * 100}).decode()
    size = len(frame.encode())
    async with serving("Sun.", settings=Settings(max_frame_bytes=size)) as server:
        async with server.connect() as client:
            await client.send_raw(frame)
            last = await client.segment()
            await client.send_raw(frame + " ")
            error = await refused(client)

        assert last[-1]["type"] == "response.completed"
        assert error == Refusal(400, "payload_too_large")


async def test_more_creates_than_the_queue_holds_are_refused_and_the_others_answered() -> None:
    settings = Settings(max_queued_creates=2)
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        with held_at(1, server.engine) as held:
            await client.send("response.create", **BODY)
            await held.reached.wait()
            for _ in range(3):
                await client.send("response.create", **BODY)
            while not client.errors:
                await client.receive()
            held.release()
            for _ in range(3):
                last = await client.segment()
                assert last[-1]["type"] == "response.completed"

        (frame,) = client.errors
        assert refusal(frame["status"], frame["error"]) == Refusal(429, "rate_limit_exceeded")
        assert frame["error"]["type"] == "rate_limit_error"
        assert len(client.streams) == 3


async def test_errors_are_numbered() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        for _ in range(3):
            await client.send_raw("{}")

        assert [(await client.error())["sequence_number"] for _ in range(3)] == [0, 1, 2]
