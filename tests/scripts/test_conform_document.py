"""The documentation lists the checks and rules that there are."""

import re

import pytest

from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.rules import Rule
from scripts.conformance.document import DOCUMENT, renewed


def test_the_documentation_is_current() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")

    assert document == renewed(document), "run python -m scripts.conformance.document"


def test_every_check_and_rule_is_listed() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")

    names = {check.name.partition("/")[2] for check in CHECKS} | {rule.id for rule in Rule}
    assert [name for name in names if f"| `{name}` |" not in document] == []


def test_lists_that_are_old_are_replaced() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    name = CHECKS[0].name.partition("/")[2]

    old = document.replace(f"| `{name}` |", "| `no-such-check` |")

    assert old != document
    assert renewed(old) == renewed(document)


@pytest.mark.parametrize(
    ("heading", "num_rows"), [("Twenty things that go wrong", 20), ("The errors", 24)]
)
def test_what_is_said_to_be_checked_is(heading: str, num_rows: int) -> None:
    document = DOCUMENT.read_text(encoding="utf-8")

    section = document.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    head, _, *rows = [
        re.split(r" ?\| ?", line)[1:-1] for line in section.splitlines() if "|" in line
    ]
    checks, reasons = head.index("checks"), len(head) - 1
    assert len(rows) == num_rows
    for row in rows:
        names = re.findall("`([^`]+)`", row[checks])
        assert names or row[reasons], row
        unknown = [name for name in names if not chosen(CHECKS, patterns=[name])]
        assert set(unknown) <= {rule.id for rule in Rule}
