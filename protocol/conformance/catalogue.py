"""All checks, in the order in which they are played and shown."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from protocol.conformance.check import Check, Way
from protocol.conformance.checks import (
    appending,
    chaining,
    constraints,
    conversations,
    injecting,
    lanes,
    open_responses,
    over_http,
    refusing,
    steering,
    stored,
    streams,
    structured,
    tolerance,
    warming_up,
)

_MODULES = (
    streams,
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
    tolerance,
    conversations,
    appending,
    injecting,
)

CHECKS: tuple[Check, ...] = tuple(check for module in _MODULES for check in module.checks)


def chosen(
    checks: Iterable[Check], ways: Sequence[Way] = (), patterns: Sequence[str] = ()
) -> list[Check]:
    """Return those of ``checks`` that are of ``ways`` and match one of ``patterns``.

    Args:
        checks: to choose from.
        ways: all, if there are none.
        patterns: of names or rules, with ``*``; all, if there are none.
    """
    return [
        check
        for check in checks
        if (not ways or check.way in ways)
        and (not patterns or any(_matches(check, pattern) for pattern in patterns))
    ]


def _matches(check: Check, pattern: str) -> bool:
    bare = check.name.partition("/")[2]
    return any(fnmatchcase(name, pattern) for name in (check.name, bare, check.rule.id))
