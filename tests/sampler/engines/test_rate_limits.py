"""What headers say of rate limits, in the forms of Cerebras, OpenAI and RFC 9110."""

import pytest

from sampler.engines.endpoint.rate_limits import exhausted_for, rate_limits_in, retry_after

DATE = "Wed, 21 Oct 2026 07:28:00 GMT"
LATER = "Wed, 21 Oct 2026 07:28:09 GMT"
EARLIER = "Wed, 21 Oct 2026 07:20:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "3"}, 3.0),
        ({"retry-after": LATER, "date": DATE}, 9.0),
        ({"retry-after": EARLIER, "date": DATE}, None),
        ({"retry-after": EARLIER}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after-ms": "0"}, None),
        ({"retry-after-ms": "0.0", "retry-after": "3"}, 3.0),
        (
            {
                "retry-after": "0",
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "60s",
            },
            60.0,
        ),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Wed, 99 Foo"}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1s"}, 1.0),
        (
            {
                "retry-after": "2",
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "60s",
            },
            2.0,
        ),
    ],
)
def test_when_to_ask_again(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [
        ("11.382867", 11.382867),
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("120ms", 0.12),
        ("1h2m3.5s", 3723.5),
        ("1d", 86400.0),
        ("0", 0.0),
        ("soon", None),
        ("", None),
    ],
)
def test_every_form_of_a_reset(reset: str, seconds: float | None) -> None:
    headers = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": reset}

    assert exhausted_for(headers) == (None if seconds is None else pytest.approx(seconds))


def test_only_limits_that_are_used_up_count_and_the_last_reset_of_them() -> None:
    headers = {
        "x-ratelimit-remaining-requests-day": "5",
        "x-ratelimit-reset-requests-day": "33000",
        "X-RateLimit-Remaining-Tokens-Minute": "0",
        "X-RateLimit-Reset-Tokens-Minute": "11.5",
        "x-ratelimit-remaining-requests-minute": "0",
        "x-ratelimit-reset-requests-minute": "3",
    }

    assert exhausted_for(headers) == 11.5


def test_the_headers_that_are_shown_are_those_of_limits() -> None:
    assert rate_limits_in({"X-RateLimit-Limit-Tokens": "9", "date": DATE}) == {
        "x-ratelimit-limit-tokens": "9"
    }
