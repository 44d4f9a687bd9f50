"""What is our fault: a step that fails, a bug, a peer too slow for us."""

import asyncio
import json
from typing import Any, NoReturn, cast

import pytest
from websockets.exceptions import ConnectionClosed

from protocol.codec import encode
from sampler.run import RunState
from server.settings import Settings
from tests.server.models import OSLO, failing_at
from tests.server.running import (
    BODY,
    TERMINAL,
    Client,
    calls_in,
    output,
    parse_sse,
    serving,
    suspended,
    text_in,
    until,
)

BALLAST = "a" * 6_000_000
"""Repeated in each lifecycle event. Two of these do not fit the buffers between the server and a
client that does not read."""


async def test_a_step_that_fails_fails_the_response_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        with failing_at(4, server.engine):
            failed = await client.create()
        next_one = await client.create()

        assert failed[-1]["type"] == "response.failed"
        assert failed[-1]["response"]["error"]["code"] == "server_error"
        assert "out of memory" not in failed[-1]["response"]["error"]["message"]
        assert "out of memory" in caplog.text
        assert next_one[-1]["type"] == "response.done"


@pytest.mark.parametrize("step", [1, 2])
async def test_a_step_that_fails_after_a_resumption_fails_the_response_once(step: int) -> None:
    async with suspended() as (server, client, call):
        with failing_at(step, server.engine):
            last = await client.append(output(call))
        await client.send("response.append", input=[output(call)])
        error = await client.error()

        (stream,) = client.streams
        assert [event["type"] for event in stream if event["type"] in TERMINAL] == [
            "response.failed"
        ]
        assert last[-1]["response"]["output"][0]["call_id"] == call["call_id"]
        assert error["error"]["code"] == "no_suspended_response"


async def test_a_step_that_fails_frees_the_run() -> None:
    async with serving(OSLO) as server, server.connect() as client:
        with failing_at(1, server.engine):
            await client.create()
        metrics = await server.metrics()

        assert metrics["suspend_kv_tokens"] == 0
        assert metrics["suspend_post_inference_total"] == 1


async def test_over_http_a_step_that_fails_is_an_error_500() -> None:
    async with serving("Sun.") as server, server.http() as http:
        with failing_at(2, server.engine):
            answer = await http.post("/v1/responses", json=BODY)

        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "server_error"
        assert answer.json()["error"]["type"] == "server_error"


async def test_in_an_event_stream_a_step_that_fails_is_an_error_and_its_end() -> None:
    async with serving("Sun.") as server, server.http() as http:
        with failing_at(2, server.engine):
            answer = await http.post("/v1/responses", json=BODY | {"stream": True})

        *frames, done = parse_sse(answer.text)
        events = [json.loads(data) for _, data in frames]
        error, failed = events[-2:]
        assert answer.status_code == 200
        assert [error["type"], failed["type"]] == ["error", "response.failed"]
        assert error["code"] == error["error"]["code"] == "server_error"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert done == ("", "[DONE]")


async def call_and_append(client: Client) -> None:
    events = await client.create()
    await client.append(*map(output, calls_in(events)))


def broken(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "place", ["server.run_report.RunReport.told_of", "server.reading.parse_append"]
)
async def test_a_bug_closes_its_connection_is_logged_and_spares_the_others(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as other:
        call = calls_in(await other.create())[0]
        async with server.connect("append") as client:
            with monkeypatch.context() as patch:
                patch.setattr(place, broken)
                with pytest.raises(ConnectionClosed) as closed:
                    await call_and_append(client)
            await until(lambda: len(server.engine.runs) == 1)
        last = await other.append(output(call))

        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert "a bug" in caplog.text
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_bug_over_http_is_an_error_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.run_report.RunReport.told_of", broken)
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.post("/v1/responses", json=BODY)

        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "the server made a mistake",
            "type": "server_error",
            "param": None,
            "code": "server_error",
        }
        assert "a bug" in caplog.text


async def test_a_slow_reader_pauses_its_own_run_alone() -> None:
    async with serving("Sun." * 20) as server:
        async with server.connect() as slow, server.connect() as quick:
            slow.socket.transport.pause_reading()
            await slow.send("response.create", input="Hi", user=BALLAST)
            await until(lambda: len(server.engine.runs) == 1)
            (run,) = server.engine.runs
            last = await quick.create()
            paused_at = run.segments[-1].output_tokens
            slow.socket.transport.resume_reading()
            late = await slow.segment()

        assert last[-1]["type"] == "response.completed"
        assert paused_at == 0
        assert run.state is RunState.COMPLETED
        assert text_in(late[-1]["response"]) == "Sun." * 20


async def test_a_client_that_reads_nothing_for_too_long_loses_its_run_and_holds_up_nobody() -> None:
    settings = Settings(send_timeout_seconds=0.05)
    async with serving("Sun." * 20, settings=settings) as server:
        async with server.connect() as slow, server.connect() as quick:
            slow.socket.transport.pause_reading()
            await slow.send("response.create", input="Hi", user=BALLAST)
            await until(lambda: len(server.engine.runs) == 1)
            (run,) = server.engine.runs
            last = await quick.create()
            await until(lambda: server.num_requests == 1)
            slow.abort()

        assert run.state is RunState.CANCELLED
        assert text_in(last[-1]["response"]) == "Sun." * 20


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(False, id="sampled"),
        pytest.param(True, id="told again", marks=pytest.mark.slow),
    ],
)
async def test_an_event_stream_that_nobody_reads_is_given_up_and_holds_up_nobody(
    stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(send_timeout_seconds=0.05, recent_responses=0)
    body = encode(BODY | {"input": "Hi", "user": BALLAST, "stream": not stored})
    asked = b"POST /v1/responses"
    async with serving("Sun." * 20, settings=settings) as server, server.http() as http:
        if stored:
            past = (await http.post("/v1/responses", content=body)).json()
            asked, body = f"GET /v1/responses/{past['id']}?stream=true".encode(), b""
        head = b"%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        cast(asyncio.Transport, writer.transport).pause_reading()
        writer.write(head % (asked, len(body)) + body)
        await until(lambda: server.num_requests == 1)
        await until(lambda: server.num_requests == 0)
        await server.until_free()
        answer = await http.post("/v1/responses", json=BODY)
        writer.transport.abort()

        assert text_in(answer.json()) == "Sun." * 20
        assert not any(record.exc_info for record in caplog.records)


async def test_a_client_that_leaves_while_it_is_waited_for_frees_its_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving("Sun.") as server, server.connect() as slow:
        slow.socket.transport.pause_reading()
        await slow.send("response.create", input="Hi", user=BALLAST)
        await until(lambda: len(server.engine.runs) == 1)
        slow.abort()
        await server.until_free()
        await until(lambda: server.num_requests == 0)

        assert caplog.records == []
