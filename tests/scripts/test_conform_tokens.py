"""What checks may make a model read is estimated, and what a server reports is summed up."""

import json
from typing import Any

import pytest

from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Target, Way
from protocol.conformance.rules import Rule
from protocol.conformance.transcript import Direction, Line
from scripts.conformance.tokens import Usage, estimated_input, reported
from tests.protocol.conformance.playing import TARGET, played


def line(text: Any, place: str = "socket", direction: Direction = Direction.IN) -> Line:
    return Line(direction, place, text if isinstance(text, str) else json.dumps(text))


def ended(response_id: str, *tokens: int, kind: str = "completed", number: int = 9) -> Any:
    usage = dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))
    response = {"id": response_id, "usage": usage}
    return {"type": f"response.{kind}", "sequence_number": number, "response": response}


# --- Before --------------------------------------------------------------------------------------


def estimate(name: str, target: Target = TARGET) -> int:
    checks: list[Check] = chosen(CHECKS, patterns=[name])
    assert checks, name
    return estimated_input(checks, target)


def test_each_word_of_a_long_input_counts() -> None:
    assert 4_000_000 < estimate("longer-input-than-the-context-is-refused") < 4_001_000


def test_what_no_model_reads_does_not_count() -> None:
    assert estimate("long-message-is-answered") == 0
    assert estimate("bodies-that-are-no-object-are-refused") == 0
    assert estimate("wrong-key-lets-nobody-in") < 100


def test_each_request_counts() -> None:
    once = estimate("chained/text-is-told-in-order")

    assert 10 < once < 50
    assert estimate("chained/seventeenth-create-waits") >= 17 * (once - 5)
    assert estimate("http/requests-at-once-are-apart") >= 2 * (once - 5)


def test_members_of_the_target_count() -> None:
    target = Target("m", members={"instructions": "Be brief. " * 100})

    assert estimate("http/basic-response", target) > 250


@pytest.mark.slow
def test_the_estimate_is_about_what_the_checks_send() -> None:
    checks = [check for check in CHECKS if check.rule is not Rule.CONTEXT_LENGTH]

    texts = [str(line) for check in checks for line in played(check).lines]
    sent = [text for text in texts if text.startswith("→") and '"input"' in text]
    characters = sum(len(text) for text in sent if "[[[" not in text)  # too deep to be read

    assert 0.5 < estimated_input(checks, TARGET) / (characters / 4) < 2


# --- After ---------------------------------------------------------------------------------------


def test_usage_of_each_response_is_summed_up() -> None:
    lines = [line(ended("a", 5, 3)), line(ended("b", 7, 1, kind="incomplete"))]

    assert reported(lines) == Usage(12, 4)


def test_a_response_that_is_shown_again_counts_once() -> None:
    resource = {"id": "a", "usage": {"input_tokens": 5, "output_tokens": 3}}
    lines = [
        line("POST /responses {}", "http", Direction.OUT),
        line("200", "http"),
        line(f"data: {json.dumps(ended('a', 5, 3))}", "http"),
        line("data: [DONE]", "http"),
        line("GET /responses/a", "http", Direction.OUT),
        line("200", "http"),
        *(line(text, "http") for text in json.dumps(resource, indent=2).splitlines()),
    ]

    assert reported(lines) == reported(lines[5:]) == reported(lines[:4]) == Usage(5, 3)


def test_each_segment_of_a_response_counts() -> None:
    lines = [
        line(ended("a", 5, 3, kind="done", number=4)),
        line(ended("a", 6, 2, kind="done", number=9)),
        line(ended("a", 7, 1)),
    ]

    assert reported(lines) == Usage(18, 6)


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        '{"usage": ',
        '{"usage": null}',
        '{"usage": {"input_tokens": "many", "output_tokens": 1}}',
        '{"response": [], "usage": {"input_tokens": 1, "output_tokens": 1}}',
        '["usage"]',
    ],
)
@pytest.mark.parametrize("place", ["http", "socket"])
def test_what_does_not_tell_usage_is_passed_over(text: str, place: str) -> None:
    assert reported([line(text, place)]) == Usage()
    assert reported([line("200", place), line(text, place)]) == Usage()


def test_what_is_sent_is_no_report() -> None:
    assert reported([line(ended("a", 5, 3), direction=Direction.OUT)]) == Usage()


@pytest.mark.parametrize("way", [Way.HTTP, Way.CHAINED])
def test_usage_is_found_in_what_is_played(way: Way) -> None:
    (check,) = chosen(CHECKS, [way], ["call-is-told-in-order"])

    assert reported(played(check).lines).num_output_tokens > 0
