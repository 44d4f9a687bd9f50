"""What the server counted during a trial: the difference of its metrics after and before."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from scripts.comparison.agents import Endpoint

_COUNTS = {
    "suspend_tokens_forwarded_total": "tokens_forwarded",
    "suspend_tokens_reforwarded_total": "tokens_reforwarded",
    "suspend_template_renders_total": "template_renders",
    "suspend_encodes_total": "encodes",
    "suspend_tokens_encoded_total": "tokens_encoded",
}
_STAGES = {
    "suspend_stage_runs_total": "stage_runs",
    "suspend_stage_items_total": "stage_items",
    "suspend_stage_seconds_total": "stage_seconds",
}
_LOOP_LAG = "suspend_event_loop_lag_seconds_bucket"


@dataclass(frozen=True)
class ServerCounts:
    """Counts of a server since it started, or of a time in its life."""

    counts: dict[str, float] = field(default_factory=dict)
    """By the names of ``Trial.counts``."""
    loop_lag: dict[str, float] = field(default_factory=dict)
    """Cumulative, by upper bound in seconds; the last bound is ``+Inf``."""

    def since(self, before: "ServerCounts") -> "ServerCounts":
        """Return what was counted after ``before``."""
        return ServerCounts(
            _difference(self.counts, before.counts), _difference(self.loop_lag, before.loop_lag)
        )


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    # A counter with labels is there from its first count on.
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


async def server_counts(client: httpx2.AsyncClient, endpoint: Endpoint) -> ServerCounts:
    """Return the counts of a server as they are now.

    Raises:
        httpx2.HTTPError: it does not answer, or not with its metrics.
    """
    reply = await client.get(f"{endpoint.url}/metrics", headers=endpoint.headers)
    reply.raise_for_status()
    return read_counts(reply.text)


def read_counts(exposition: str) -> ServerCounts:
    """Return the counts in ``exposition``, metrics in the Prometheus text format."""
    families = text_string_to_metric_families(exposition)
    return _counts(sample for family in families for sample in family.samples)


def _counts(samples: Iterable[Sample]) -> ServerCounts:
    found = ServerCounts()
    for sample in samples:
        if (name := _COUNTS.get(sample.name)) is not None:
            found.counts[name] = sample.value
        elif (name := _STAGES.get(sample.name)) is not None:
            found.counts[f"{name}:{sample.labels['stage']}"] = sample.value
        elif sample.name == _LOOP_LAG:
            found.loop_lag[sample.labels["le"]] = sample.value
    return found
