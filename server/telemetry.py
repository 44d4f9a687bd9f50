"""What can be seen from outside, in the Prometheus text format.

The engine counts its own work in plain integers; they are read when someone asks, so counting costs
the sampling loop nothing.
"""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sampler.cache_pool import BLOCK_SIZE
from sampler.engine import Engine
from sampler.run import RunState, Segment
from server.work import Tallies

# From a cached kilobyte on a GPU to a cold context on a laptop.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


_LAG_SECONDS = tuple(n * 10.0**e for e in range(-4, 1) for n in (1, 2, 5))


class Telemetry:
    """The metrics of one server."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.stages = Tallies()
        """The work around inference, of all requests together."""
        self._registry.register(_StageCollector(self.stages))
        self.pre_inference = Counter(
            "suspend_pre_inference",
            "Times the work before inference was done: once a run.",
            registry=self._registry,
        )
        self.post_inference = Counter(
            "suspend_post_inference",
            "Times the work after inference was done: once a run.",
            registry=self._registry,
        )
        self._resume_seconds = Histogram(
            "suspend_resume_seconds",
            "From the append received to the first new token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_token_seconds = Histogram(
            "suspend_time_to_first_token_seconds",
            "From the request received to the first token, of new runs.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.event_loop_lag = Histogram(
            "suspend_event_loop_lag_seconds",
            "How much later than asked for the event loop does what is due.",
            buckets=_LAG_SECONDS,
            registry=self._registry,
        )

    def observe_segment(self, segment: Segment, *, is_resumed: bool) -> None:
        """Take note of a segment that ended."""
        if (seconds := segment.time_to_first_token) is not None:
            histogram = self._resume_seconds if is_resumed else self._first_token_seconds
            histogram.observe(seconds)

    def exposition(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)


_COUNTS = {
    "tokens_forwarded": "Positions that went through the model.",
    "tokens_reforwarded": "Positions that went through the model again for the same run.",
    "tokens_sampled": "Tokens sampled.",
    "forward_passes": "Forward passes; runs that share one count once.",
    "swaps_out": "Caches of runs that were written to a file.",
    "swaps_in": "Caches of runs that were read back.",
    "tokens_swapped": "Positions that were swapped out.",
    "discards": "Caches of suspended runs that were given up, to be computed again.",
    "kept_discards": "Caches kept for followers that were given up.",
    "preemptions": "Caches of runs being sampled that were given up, to be computed again.",
    "template_renders": "Conversations laid out as turns.",
    "encodes": "Texts given to the tokenizer.",
    "tokens_encoded": "Tokens that texts came to.",
}
"""The engine's counts, by the names that ``sampler.counters`` has for them."""


class _StageCollector(Collector):
    def __init__(self, stages: Tallies) -> None:
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        for name, help_text in (
            ("runs", "Times that a stage of the work around inference was gone through."),
            ("items", "Items, texts or segments that it was gone through with."),
            ("seconds", "How long that took."),
        ):
            family = CounterMetricFamily(f"suspend_stage_{name}", help_text, labels=["stage"])
            for stage, tally in self._stages:
                family.add_metric([stage.value], getattr(tally, name))
            yield family


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for name, help_text in _COUNTS.items():
            value = getattr(self._engine.counters, name)
            yield CounterMetricFamily(f"suspend_{name}", help_text, value=value)
        yield self._model()
        yield self._runs()
        yield GaugeMetricFamily(
            "suspend_kv_tokens", "Positions held in caches.", value=self._engine.kv_tokens
        )
        yield self._blocks()

    def _model(self) -> InfoMetricFamily:
        simulated = "true" if self._engine.is_simulated else "false"
        return InfoMetricFamily(
            "suspend_model",
            "The model that all of this is about; where it is simulated, there is none.",
            value={"name": self._engine.name, "simulated": simulated},
        )

    def _blocks(self) -> GaugeMetricFamily:
        memory = self._engine.memory
        blocks = GaugeMetricFamily(
            "suspend_kv_blocks",
            f"Blocks of {BLOCK_SIZE} positions; cached ones are free, and can be found by content.",
            labels=["state"],
        )
        blocks.add_metric(["used"], memory.num_used)
        blocks.add_metric(["cached"], memory.num_cached)
        blocks.add_metric(["free"], memory.num_free - memory.num_cached)
        blocks.add_metric(["swapped"], memory.num_swapped)
        return blocks

    def _runs(self) -> GaugeMetricFamily:
        runs = GaugeMetricFamily("suspend_runs", "Runs that are not over.", labels=["state"])
        tally = Tally(run.state for run in self._engine.runs)
        for state in (RunState.QUEUED, RunState.PREFILLING, RunState.DECODING, RunState.SUSPENDED):
            runs.add_metric([state.value], tally[state])
        return runs
