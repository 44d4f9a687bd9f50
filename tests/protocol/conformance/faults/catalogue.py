"""All faults."""

from tests.protocol.conformance.faults import (
    appending,
    chaining,
    constraints,
    conversations,
    injecting,
    lanes,
    members,
    open_responses,
    over_http,
    refusing,
    steering,
    stored,
    streams,
    structured,
    warming_up,
)
from tests.protocol.conformance.faults.fault import Fault

_MODULES = (
    streams,
    members,
    over_http,
    open_responses,
    stored,
    refusing,
    chaining,
    warming_up,
    lanes,
    steering,
    constraints,
    structured,
    conversations,
    appending,
    injecting,
)

FAULTS: tuple[Fault, ...] = tuple(fault for module in _MODULES for fault in module.faults)
