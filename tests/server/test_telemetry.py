"""What ``/metrics`` counts."""

from sampler.run import RunState
from server.settings import Settings
from tests.server.models import OSLO, held_at
from tests.server.running import BODY, calls_in, output, serving, suspended, until

COUNTERS = [
    "suspend_tokens_forwarded_total",
    "suspend_tokens_reforwarded_total",
    "suspend_tokens_sampled_total",
    "suspend_forward_passes_total",
    "suspend_swaps_out_total",
    "suspend_swaps_in_total",
    "suspend_tokens_swapped_total",
    "suspend_discards_total",
    "suspend_kept_discards_total",
    "suspend_preemptions_total",
    "suspend_template_renders_total",
    "suspend_encodes_total",
    "suspend_pre_inference_total",
    "suspend_post_inference_total",
]
GAUGES = [
    "suspend_kv_tokens",
    "suspend_kv_blocks{used}",
    "suspend_kv_blocks{cached}",
    "suspend_kv_blocks{swapped}",
    "suspend_runs{queued}",
    "suspend_runs{prefilling}",
    "suspend_runs{decoding}",
    "suspend_runs{suspended}",
]
HISTOGRAMS = ["suspend_resume_seconds", "suspend_time_to_first_token_seconds"]


async def test_every_metric_is_there_from_the_start() -> None:
    async with serving("Sun.") as server:
        metrics = await server.metrics()

        counts = [f"{name}_count" for name in HISTOGRAMS]
        values = {name: metrics[name] for name in COUNTERS + GAUGES + counts}
        assert values.pop("suspend_encodes_total") > 0  # a chat format encodes its fixed parts
        assert set(values.values()) == {0}


async def test_metrics_are_in_the_prometheus_text_format() -> None:
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.get("/metrics")

        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "# TYPE suspend_runs gauge\n" in answer.text


async def test_a_suspended_run_is_seen() -> None:
    async with suspended() as (server, client, _):
        metrics = await server.metrics()

        usage = client.streams[0][-1]["response"]["usage"]
        assert metrics["suspend_runs{suspended}"] == 1
        assert metrics["suspend_kv_tokens"] == usage["total_tokens"] - 1


async def test_a_run_that_is_sampled_is_seen() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            metrics = await server.metrics()
            model.release()
            await client.segment()

        assert metrics["suspend_runs{decoding}"] == 1


async def test_a_run_in_two_segments_is_prepared_and_accounted_for_once() -> None:
    async with suspended() as (server, client, call):
        before = await server.metrics()
        await client.append(output(call))
        await until(lambda: not server.engine.runs)
        after = await server.metrics()

        assert before["suspend_pre_inference_total"] == 1
        assert before["suspend_post_inference_total"] == 0
        assert after["suspend_pre_inference_total"] == 1
        assert after["suspend_post_inference_total"] == 1
        assert after["suspend_template_renders_total"] == 1


async def test_an_abandoned_run_is_accounted_for_once() -> None:
    async with suspended() as (server, client, _):
        await client.create(tool_choice="none")
        metrics = await server.metrics()

        assert metrics["suspend_pre_inference_total"] == 2
        assert metrics["suspend_post_inference_total"] == 2


async def test_each_stateless_request_is_prepared_and_accounted_for() -> None:
    async with serving(OSLO, "Sun.") as server, server.http() as http:
        for stream in (False, True, False):
            await http.post("/v1/responses", json=BODY | {"stream": stream})
        metrics = await server.metrics()

        assert metrics["suspend_pre_inference_total"] == 3
        assert metrics["suspend_post_inference_total"] == 3


async def test_a_resumption_forwards_only_what_is_new() -> None:
    async with suspended() as (server, client, call):
        before = await server.metrics()
        last = await client.append(output(call))
        after = await server.metrics()

        usage = last[-1]["response"]["usage"]
        new = usage["total_tokens"] - 1 - usage["input_tokens_details"]["cached_tokens"]
        name = "suspend_tokens_forwarded_total"
        assert after[name] - before[name] == new
        assert after["suspend_tokens_reforwarded_total"] == 0


async def test_tokens_and_passes_are_counted() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        last = await client.create()
        metrics = await server.metrics()

        usage = last[-1]["response"]["usage"]
        assert metrics["suspend_tokens_sampled_total"] == usage["output_tokens"]
        assert metrics["suspend_forward_passes_total"] == usage["output_tokens"]


async def test_first_tokens_of_new_and_of_resumed_runs_are_timed_apart() -> None:
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect("append") as client:
        first = await client.create()
        second = await client.append(output(calls_in(first)[0]))
        await client.append(output(calls_in(second)[0]))
        metrics = await server.metrics()

        assert metrics["suspend_time_to_first_token_seconds_count"] == 1
        assert metrics["suspend_resume_seconds_count"] == 2
        assert metrics["suspend_resume_seconds_sum"] > 0


async def test_a_finished_run_is_not_counted_among_the_runs() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.create()
        metrics = await server.metrics()

        assert sum(metrics[f"suspend_runs{{{state.value}}}"] for state in list(RunState)[:4]) == 0


async def test_a_run_that_waits_for_its_turn_is_seen_and_accounted_for_when_it_is_dropped() -> None:
    settings = Settings(max_in_flight=1)
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        with held_at(1, server.engine) as model:
            for lane in ("a", "b"):
                await client.send("response.create", **BODY, stream_id=lane)
            await model.reached.wait()
            await until(lambda: len(server.engine.runs) == 2)
            waiting = await server.metrics()
            client.abort()
            model.release()
            await server.until_free()
        await until(lambda: server.num_requests == 0)
        dropped = await server.metrics()

        assert waiting["suspend_runs{queued}"] == 1
        assert dropped["suspend_runs{queued}"] == 0
        assert dropped["suspend_pre_inference_total"] == 2
        assert dropped["suspend_post_inference_total"] == 2


async def test_a_request_that_is_refused_is_not_counted() -> None:
    async with serving("Sun.") as server, server.http() as http:
        await http.post("/v1/responses", json={"input": []})
        metrics = await server.metrics()

        assert metrics["suspend_pre_inference_total"] == 0
