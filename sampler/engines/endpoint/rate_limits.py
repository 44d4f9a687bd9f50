"""What the headers of an answer say about when to ask again.

Two forms of the limits are known. Cerebras: ``x-ratelimit-remaining-tokens-minute``, resets as
seconds. OpenAI: ``x-ratelimit-remaining-tokens``, resets like ``1s``, ``6m0s`` and ``120ms``.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_PREFIX = "x-ratelimit-"
_REMAINING = f"{_PREFIX}remaining-"
_RESET = f"{_PREFIX}reset-"

_NUMBER = r"\d+(?:\.\d+)?"
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|s|m|h|d))+")
_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def rate_limits_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are about rate limits, in lower case."""
    named = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in named.items() if name.startswith(_PREFIX)}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return in how many seconds to ask again, or None where the answer does not say.

    ``retry-after-ms`` is finer than ``retry-after``, so it goes first; the latter is seconds or a
    date (RFC 9110, 10.2.3), which is compared with the answer's own. Limits that are used up count
    where there is neither. To ask again at once is what nobody who has just refused can mean: what
    is not later than now says nothing.
    """
    milliseconds = _number(headers.get("retry-after-ms", ""))
    value = headers.get("retry-after", "")
    told = (
        None if milliseconds is None else milliseconds / 1000,
        _number(value),
        _seconds_until(value, headers.get("date", "")),
        exhausted_for(headers),
    )
    return next((seconds for seconds in told if seconds is not None and seconds > 0), None)


def exhausted_for(headers: Mapping[str, str]) -> float | None:
    """Return in how many seconds all limits of which nothing remains are reset, None if all do."""
    limits = rate_limits_in(headers)
    used_up = [
        name.removeprefix(_REMAINING)
        for name, value in limits.items()
        if name.startswith(_REMAINING) and _number(value) == 0
    ]
    resets = [_duration(limits.get(_RESET + limit, "")) for limit in used_up]
    return max((reset for reset in resets if reset is not None), default=None)


def _number(value: str) -> float | None:
    return float(value) if re.fullmatch(_NUMBER, value.strip()) else None


def _duration(value: str) -> float | None:
    """Return the seconds of ``11.38``, ``1s``, ``6m0s`` or ``120ms``."""
    value = value.strip()
    if not _DURATION.fullmatch(value):
        return _number(value)
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))


def _seconds_until(date: str, now: str) -> float | None:
    moment = _moment(date)
    if moment is None:
        return None
    return (moment - (_moment(now) or datetime.now(UTC))).total_seconds()


def _moment(date: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
