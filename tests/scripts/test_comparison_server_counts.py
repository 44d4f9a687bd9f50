"""Counts of a trial are what the metrics grew by."""

from scripts.comparison.server_counts import read_counts

BEFORE = """
# TYPE suspend_encodes_total counter
suspend_encodes_total 3.0
# TYPE suspend_stage_runs_total counter
suspend_stage_runs_total{stage="render"} 2.0
# TYPE suspend_event_loop_lag_seconds histogram
suspend_event_loop_lag_seconds_bucket{le="0.001"} 5.0
suspend_event_loop_lag_seconds_bucket{le="+Inf"} 6.0
suspend_event_loop_lag_seconds_sum 0.1
suspend_event_loop_lag_seconds_count 6.0
# TYPE suspend_kv_tokens gauge
suspend_kv_tokens 12.0
"""
AFTER = """
# TYPE suspend_encodes_total counter
suspend_encodes_total 10.0
# TYPE suspend_stage_runs_total counter
suspend_stage_runs_total{stage="render"} 4.0
suspend_stage_runs_total{stage="ledger"} 1.0
# TYPE suspend_event_loop_lag_seconds histogram
suspend_event_loop_lag_seconds_bucket{le="0.001"} 8.0
suspend_event_loop_lag_seconds_bucket{le="+Inf"} 10.0
suspend_event_loop_lag_seconds_sum 0.2
suspend_event_loop_lag_seconds_count 10.0
"""


def test_counters_are_told_by_short_names_and_stages() -> None:
    counted = read_counts(BEFORE)

    assert counted.counts == {"encodes": 3.0, "stage_runs:render": 2.0}
    assert counted.loop_lag == {"0.001": 5.0, "+Inf": 6.0}


def test_what_was_counted_before_is_left_out() -> None:
    counted = read_counts(AFTER).since(read_counts(BEFORE))

    assert counted.counts == {"encodes": 7.0, "stage_runs:render": 2.0, "stage_runs:ledger": 1.0}
    assert counted.loop_lag == {"0.001": 3.0, "+Inf": 4.0}
