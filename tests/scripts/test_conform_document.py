"""The documentation lists the checks and rules that there are."""

from protocol.conformance.catalogue import CHECKS
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
