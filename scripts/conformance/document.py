"""The lists in ``docs/conformance.md``: checks and rules, as the code has them.

``python -m scripts.conformance.document`` writes them anew, and a test sees that this was done.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from protocol.conformance.catalogue import CHECKS
from protocol.conformance.check import Check
from protocol.conformance.rules import Rule

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
_MARKED = "<!-- {0}, by python -m scripts.conformance.document -->\n{1}<!-- end of {0} -->\n"


def renewed(document: str) -> str:
    """Return ``document`` with its lists as they are now."""
    for name, text in (("checks", _checks(CHECKS)), ("rules", _rules())):
        place = re.search(_MARKED.format(name, ".*?"), document, re.DOTALL)
        assert place is not None, f"there is a place for the {name}"
        head, tail = document[: place.start()], document[place.end() :]
        document = head + _MARKED.format(name, text) + tail
    return document


def _checks(checks: Sequence[Check]) -> str:
    text = "".join(
        f"\n### {_subject(module)}\n\n{_table(('check', 'in', 'what has to hold', 'rule'), rows)}"
        for module, rows in (
            (module, _check_rows(list(of_module)))
            for module, of_module in groupby(checks, key=lambda check: check.play.__module__)
        )
    )
    return f"{text}\n"


def _subject(module: str) -> str:
    """Return what a module of checks is about: the first sentence in it, without its end."""
    return (sys.modules[module].__doc__ or "").partition("\n")[0].strip().removesuffix(".")


def _check_rows(checks: Sequence[Check]) -> Iterator[tuple[str, ...]]:
    """Return a row for each check, whichever the ways are in which it is played."""
    for name, of_name in groupby(checks, key=lambda check: check.name.partition("/")[2]):
        same = list(of_name)
        ways = ", ".join(check.way.value for check in same)
        yield f"`{name}`", ways, same[0].says, f"`{same[0].rule.id}`"


def _rules() -> str:
    rows = ((f"`{rule.id}`", rule.text, rule.source) for rule in Rule)
    return f"\n{_table(('rule', 'what has to hold', 'who says so'), rows)}\n"


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
