"""A client that goes away takes its run with it, and nothing else."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from sampler.local_engine import LocalEngine
from tests.server.models import OSLO, held_at
from tests.server.running import BODY, Client, Running, calls_in, output, serving, until
from tests.tiny_model import tiny_model


async def abort(client: Client) -> None:
    """Drop the connection without a word, as Codex does."""
    client.abort()


async def close(client: Client) -> None:
    """Say goodbye; the answer comes when the server has read it."""
    await client.socket.close()


Leave = Callable[[Client], Awaitable[None]]
either_way = pytest.mark.parametrize("leave", [abort, close])


async def check_others_go_on(server: Running) -> None:
    """Check that everything is free, and that a run of another connection is whole."""
    await server.until_free()
    await until(lambda: server.num_requests == 0)
    async with server.connect("append") as other:
        first = await other.create()
        last = await other.append(output(calls_in(first)[0]))
    assert last[-1]["type"] == "response.completed"


@either_way
async def test_leaving_while_suspended_frees_the_run(leave: Leave) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        await client.create()
        await leave(client)
        await check_others_go_on(server)


@either_way
async def test_leaving_while_a_token_is_sampled_frees_the_run(leave: Leave) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        with held_at(3, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await leave(client)
            await model.release_once_stopped()
        await check_others_go_on(server)


@either_way
async def test_leaving_while_a_resumed_run_is_prefilled_frees_it(leave: Leave) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        call = calls_in(await client.create())[0]
        with held_at(1, server.engine) as model:
            await client.send("response.append", input=[output(call)])
            await model.reached.wait()
            await leave(client)
            await model.release_once_stopped()
        await check_others_go_on(server)


@either_way
async def test_leaving_during_a_prefill_of_many_chunks_ends_it_at_the_chunk_in_flight(
    leave: Leave,
) -> None:
    engine = LocalEngine(tiny_model(), prefill_chunk=16)
    async with serving(engine=engine) as server, server.connect() as client:
        with held_at(3, engine) as model:
            await client.send("response.create", input="a" * 1000)
            await model.reached.wait()
            await leave(client)
            await model.release_once_stopped()
            await server.until_free()

        assert engine.counters.forward_passes == 3
        async with server.connect() as other:
            last = await other.create(max_output_tokens=2, tools=[], seed=1)
        assert last[-1]["type"] == "response.incomplete"


async def test_leaving_with_creates_in_the_queue_forgets_them() -> None:
    async with serving(OSLO, "Sun.") as server:
        async with server.connect("append") as client:
            with held_at(2, server.engine) as model:
                for _ in range(3):
                    await client.send("response.create", **BODY)
                await model.reached.wait()
                client.abort()
                await model.release_once_stopped()
            await server.until_free()
            await until(lambda: server.num_requests == 0)
            metrics = await server.metrics()

        assert metrics["suspend_tokens_sampled_total"] <= 2


async def test_leaving_before_the_append_is_answered_frees_the_run() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        call = calls_in(await client.create())[0]
        await client.send("response.append", input=[output(call)])
        client.abort()
        await check_others_go_on(server)


async def test_another_connection_is_sampled_while_one_leaves() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as stays:
        async with server.connect("append") as leaves:
            await asyncio.gather(stays.create(), leaves.create())
            leaves.abort()
            await until(lambda: len(server.engine.runs) == 1)
        last = await stays.append(output(calls_in(stays.streams[0])[0]))

        assert last[-1]["type"] == "response.completed"


async def test_a_client_that_breaks_the_websocket_protocol_is_closed_and_its_run_freed() -> None:
    async with serving(OSLO, "Sun.") as server:
        async with server.connect("append") as client:
            await client.create()
            client.send_bytes(b"\x83\x80\x00\x00\x00\x00")  # opcode 3 is reserved
            with pytest.raises(ConnectionClosed) as closed:
                await client.receive()
            await check_others_go_on(server)

        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == CloseCode.PROTOCOL_ERROR


@pytest.mark.slow
async def test_a_hundred_runs_suspended_and_dropped_leave_nothing() -> None:
    async with serving(OSLO, "Sun.") as server:
        for cycle in range(100):
            async with server.connect("append" if cycle % 2 else None) as client:
                await client.create()
                if cycle % 3:
                    client.abort()
        await server.until_free()
        await until(lambda: server.num_requests == 0)
        metrics = await server.metrics()

        assert metrics["suspend_kv_tokens"] == 0
        assert metrics["suspend_runs{suspended}"] == 0
        assert metrics["suspend_pre_inference_total"] == 100
        assert metrics["suspend_post_inference_total"] == 100
