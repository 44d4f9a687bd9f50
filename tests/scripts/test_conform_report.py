"""What is printed, and what machines are given."""

import io
import json
from xml.etree.ElementTree import fromstring

import pytest
from rich.console import Console

from protocol.conformance.catalogue import CHECKS
from protocol.conformance.play import Result, Verdict
from protocol.conformance.rules import Rule
from protocol.conformance.transcript import Direction, Line
from scripts.conformance.report import as_json, as_junit, is_clean, print_report
from scripts.conformance.suite import Played, not_run

ESCAPE = "\x1b[2J"
LINES = tuple(Line(Direction.IN, "socket", f"{ESCAPE}frame {number}") for number in range(20))
PASSED = Played(Verdict(CHECKS[0], Result.PASSED, num_requests=2), 0.5)
FAILED = Played(
    Verdict(CHECKS[1], Result.FAILED, f"wrong {ESCAPE}", Rule.ONE_TERMINAL, LINES, 1), 1.5
)
ABSENT = Played(Verdict(CHECKS[2], Result.NOT_SUPPORTED, "no upgrade"), 0.1)
LOST = Played(Verdict(CHECKS[3], Result.ERROR, "refused"), 0.1)
LEFT = not_run(CHECKS[4], "interrupted")
ALL = [PASSED, FAILED, ABSENT, LOST, LEFT]


def printed(*all_played: Played, notes: tuple[str, ...] = ()) -> str:
    file = io.StringIO()
    print_report(Console(file=file, width=120), all_played, notes)
    return file.getvalue()


@pytest.mark.parametrize(
    ("played", "is_it"),
    [(PASSED, True), (ABSENT, True), (LEFT, True), (FAILED, False), (LOST, False)],
)
def test_only_failures_and_errors_are_unclean(played: Played, is_it: bool) -> None:
    assert is_clean([PASSED, played]) is is_it


@pytest.mark.parametrize("all_played", [[], [ABSENT], [LEFT, ABSENT]])
def test_it_is_not_clean_where_nothing_passed(all_played: list[Played]) -> None:
    assert not is_clean(all_played)


def test_people_are_told_why_it_failed_and_shown_the_last_frames() -> None:
    text = printed(*ALL, notes=("the server is slow",))

    assert CHECKS[1].says in text
    assert "rule one-terminal" in text
    assert Rule.ONE_TERMINAL.source in text
    assert "(8 lines before" in text
    assert "frame 19" in text
    assert "frame 7" not in text
    assert "no upgrade" in text
    assert "the server is slow" in text
    assert "1 passed, 1 failed, 1 not supported, 1 error, 1 not run, 3 requests made" in text
    assert "3 requests made, no usage reported" in text


def test_people_see_one_of_many_deltas() -> None:
    deltas = [f'{{"type":"response.output_text.delta","delta":"{number}"}}' for number in range(9)]
    lines = [Line(Direction.IN, "socket", text) for text in ["begins", *deltas, "ends"]]
    verdict = Verdict(CHECKS[0], Result.FAILED, "wrong", Rule.ONE_TERMINAL, tuple(lines))

    text = printed(Played(verdict, 0.1))

    assert "(8 more deltas)" in text
    assert text.count("output_text.delta") == 1
    assert "begins" in text
    assert "ends" in text


def test_nothing_that_a_server_sends_steers_the_terminal() -> None:
    assert "\x1b" not in printed(*ALL)


def test_json_has_every_frame_of_a_failure() -> None:
    document = json.loads(as_json("http://a.test/v1", ALL, ["slow"]))

    assert document["url"] == "http://a.test/v1"
    assert document["counts"] == {
        "passed": 1,
        "failed": 1,
        "not supported": 1,
        "error": 1,
        "not run": 1,
    }
    assert document["notes"] == ["slow"]
    passed, failed, *_ = document["checks"]
    assert passed["name"] == CHECKS[0].name
    assert passed["frames"] == []
    assert passed["rule"]["id"] == CHECKS[0].rule.id
    assert failed["rule"]["id"] == "one-terminal"
    assert len(failed["frames"]) == 20


def test_what_was_used_is_summed_up() -> None:
    usage = '{"id": "resp_1", "usage": {"input_tokens": 1200, "output_tokens": 3}}'
    lines = (Line(Direction.IN, "http", "200"), Line(Direction.IN, "http", usage))
    used = Played(Verdict(CHECKS[0], Result.PASSED, lines=lines), 0.1)

    assert "2,400 input and 6 output tokens reported" in printed(used, PASSED, used)
    document = json.loads(as_json("u", [used, PASSED, used], []))
    assert document["usage"] == {"input_tokens": 2400, "output_tokens": 6}
    assert [check["usage"]["output_tokens"] for check in document["checks"]] == [3, 0, 3]


def test_junit_is_xml_whatever_the_server_sends() -> None:
    suite = fromstring(as_junit(ALL))

    numbers = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "5", "failures": "1", "errors": "1", "skipped": "2"}
    found = [[element.tag for element in case] for case in suite]
    assert found == [[], ["failure"], ["skipped"], ["error"], ["skipped"]]
    failure = suite[1][0]
    assert failure.text is not None
    assert "one-terminal" in failure.text
    assert "frame 0" in failure.text


def test_what_fails_many_checks_is_said_once() -> None:
    said = "2 checks fail by one rule, one-terminal: "

    assert said in printed(FAILED, PASSED, FAILED)
    assert said not in printed(FAILED, LOST, PASSED)
    assert json.loads(as_json("u", ALL, []))["broken_rules"] == {"one-terminal": 1}
