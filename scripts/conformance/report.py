"""What a run came to: a table for people, JSON and JUnit for machines."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.conformance.play import Result, Verdict
from protocol.conformance.rules import Rule
from protocol.conformance.transcript import Line
from scripts.conformance.fuzz import FuzzVerdict
from scripts.conformance.suite import Played
from scripts.conformance.tokens import Usage, reported

STYLES = {
    Result.PASSED: "green",
    Result.FAILED: "bold red",
    Result.NOT_SUPPORTED: "yellow",
    Result.ERROR: "bold magenta",
    Result.NOT_RUN: "dim",
}
_MAX_LINES = 12
_MAX_CHARACTERS = 400


def counts(all_played: Sequence[Played]) -> Counter[Result]:
    """Return how often each result came."""
    return Counter(played.verdict.result for played in all_played)


def broken_rules(all_played: Sequence[Played]) -> Counter[Rule]:
    """Return how many checks fail by each rule: those that do so by one mostly have one cause."""
    failed = (p.verdict for p in all_played if p.verdict.result is Result.FAILED)
    return Counter(verdict.rule or verdict.check.rule for verdict in failed)


def is_clean(all_played: Sequence[Played]) -> bool:
    """Tell whether something passed, nothing failed, and the server could be checked."""
    found = counts(all_played)
    return bool(found[Result.PASSED]) and not found[Result.FAILED] and not found[Result.ERROR]


def usage_of(verdict: Verdict) -> Usage:
    """Return what the server says was used by a check."""
    return verdict.usage if isinstance(verdict, FuzzVerdict) else reported(verdict.lines)


# --- For people ----------------------------------------------------------------------------------


def print_report(console: Console, all_played: Sequence[Played], notes: Sequence[str]) -> None:
    """Print a table of all, the evidence of each failure, and the sum."""
    console.print(_table(all_played))
    for played in all_played:
        if played.verdict.result in (Result.FAILED, Result.ERROR):
            _print_failure(console, played.verdict)
    for note in notes:
        _print_line(console, note)
    for rule, num_failures in broken_rules(all_played).most_common():
        if num_failures > 1:
            _print_line(console, f"{num_failures} checks fail by one rule, {rule.id}: {rule.text}")
    console.print(_summary(all_played))


def _table(all_played: Sequence[Played]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("check")
    table.add_column("result")
    table.add_column("s", justify="right")
    table.add_column("", overflow="fold")
    for played in all_played:
        verdict = played.verdict
        result = Text(verdict.result.value, style=STYLES[verdict.result])
        seconds = f"{played.seconds:.1f}" if verdict.result is not Result.NOT_RUN else ""
        why = "" if verdict.result is Result.FAILED else verdict.message
        table.add_row(verdict.check.name, result, seconds, _plain(why[:_MAX_CHARACTERS]))
    return table


def _print_failure(console: Console, verdict: Verdict) -> None:
    console.print()
    console.print(Text(f"{verdict.check.name}: {verdict.result.value}", style="bold red"))
    _print_line(console, verdict.check.says)
    if verdict.rule is not None:
        rule = verdict.rule
        _print_line(console, f"rule {rule.id}: {rule.text} ({rule.source})")
    _print_line(console, verdict.message, style="red")
    lines = _condensed(verdict.lines)
    skipped = len(lines) - _MAX_LINES
    if skipped > 0:
        _print_line(console, f"({skipped} lines before; --json has all)", style="dim")
    for line in lines[-_MAX_LINES:]:
        _print_line(console, _cut(line), style="dim")


def _condensed(lines: Sequence[Line]) -> list[str]:
    """Return ``lines`` with one in the place of deltas that follow each other."""
    told: list[str] = []
    for is_delta, group in groupby(lines, key=_is_delta):
        texts = list(map(str, group))
        told += [texts[0], f"({len(texts) - 1} more deltas)"] if is_delta and texts[1:] else texts
    return told


def _print_line(console: Console, text: str, style: str = "") -> None:
    print_plain(console, f"  {text}", style)


def print_plain(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is, but for what would steer a terminal: a server may have sent it."""
    console.print(_plain(text), style=style, highlight=False, soft_wrap=True)


def _is_delta(line: Line) -> bool:
    return '.delta"' in line.text or line.text.endswith(".delta")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"


def _summary(all_played: Sequence[Played]) -> Text:
    found = counts(all_played)
    words = [Text(f"{found[r]} {r.value}", style=STYLES[r]) for r in Result if found[r]]
    num_requests = sum(played.verdict.num_requests for played in all_played)
    usage = _usage_of_all(all_played)
    told = f"{usage} reported" if usage != Usage() else "no usage reported"
    return Text(", ").join([*words, Text(f"{num_requests} requests made"), Text(told)])


def _usage_of_all(all_played: Sequence[Played]) -> Usage:
    return sum((usage_of(played.verdict) for played in all_played), Usage())


def _plain(text: str) -> Text:
    """Return ``text`` without what would steer a terminal: it comes from a server."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))


# --- For machines --------------------------------------------------------------------------------


def as_json(url: str, all_played: Sequence[Played], notes: Sequence[str]) -> str:
    """Return everything as one JSON document."""
    document = {
        "url": url,
        "counts": {result.value: num for result, num in counts(all_played).items()},
        "broken_rules": {rule.id: num for rule, num in broken_rules(all_played).most_common()},
        "usage": _usage_as_members(_usage_of_all(all_played)),
        "notes": list(notes),
        "checks": [_as_members(played) for played in all_played],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _as_members(played: Played) -> dict[str, Any]:
    verdict = played.verdict
    rule = verdict.rule or verdict.check.rule
    return {
        "name": verdict.check.name,
        "says": verdict.check.says,
        "result": verdict.result.value,
        "message": verdict.message,
        "rule": {"id": rule.id, "text": rule.text, "source": rule.source},
        "seconds": round(played.seconds, 3),
        "requests": verdict.num_requests,
        "usage": _usage_as_members(usage_of(verdict)),
        "frames": [str(line) for line in verdict.lines] if _is_told(verdict) else [],
    }


def _usage_as_members(usage: Usage) -> dict[str, int]:
    return {"input_tokens": usage.num_input_tokens, "output_tokens": usage.num_output_tokens}


def _is_told(verdict: Verdict) -> bool:
    return verdict.result in (Result.FAILED, Result.ERROR)


def as_junit(all_played: Sequence[Played]) -> bytes:
    """Return a JUnit report, for what continuous integration shows."""
    found = counts(all_played)
    suite = Element(
        "testsuite",
        name="conformance",
        tests=str(len(all_played)),
        failures=str(found[Result.FAILED]),
        errors=str(found[Result.ERROR]),
        skipped=str(found[Result.NOT_SUPPORTED] + found[Result.NOT_RUN]),
        time=f"{sum(played.seconds for played in all_played):.3f}",
    )
    for played in all_played:
        _add_case(suite, played)
    indent(suite)
    document: bytes = tostring(suite, encoding="utf-8", xml_declaration=True)
    return document


_ELEMENTS = {
    Result.FAILED: "failure",
    Result.ERROR: "error",
    Result.NOT_SUPPORTED: "skipped",
    Result.NOT_RUN: "skipped",
}


def _add_case(suite: Element, played: Played) -> None:
    verdict = played.verdict
    way, _, name = verdict.check.name.partition("/")
    seconds = f"{played.seconds:.3f}"
    case = SubElement(suite, "testcase", classname=f"conformance.{way}", name=name, time=seconds)
    if verdict.result is Result.PASSED:
        return
    found = SubElement(case, _ELEMENTS[verdict.result], message=_legal(verdict.message))
    if _is_told(verdict):
        rule = verdict.rule or verdict.check.rule
        told = [f"{rule.id}: {rule.text} ({rule.source})", *map(str, verdict.lines)]
        found.text = _legal("\n".join(told))


def _legal(text: str) -> str:
    """Return ``text`` without characters that XML has no way to write."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
