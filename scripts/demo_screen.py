"""What a person sees of the demo: the runs as they happen, and the table at the end."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.demo_record import Call, Run, Segment, Totals, sum_of, totals_of


class Screen:
    """Shows runs on a console. It is the agent's observer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_mid_line = False

    def note(self, text: str) -> None:
        """Show a remark."""
        self._line(Text(text, style="dim"))

    def asked(self, question: str) -> None:
        """Show a new question."""
        self._console.print()
        self._line(Text.assemble(("question   ", "bold"), (_plain(question), "bold")))

    def said(self, delta: str) -> None:
        """Show text as it streams."""
        if not self._is_mid_line:
            self._console.print(Text("answer     ", style="bold green"), end="")
            self._is_mid_line = True
        self._console.print(Text(_plain(delta)), end="", soft_wrap=True)

    def called(self, call: Call) -> None:
        """Show a call the model made."""
        arguments = _plain(f"{call.name}({call.arguments})")
        self._line(Text.assemble(("call       ", "bold cyan"), arguments))

    def suspended(self, segment: Segment) -> None:
        """Show what is kept while the tools run."""
        kept = f"{segment.tokens_held:,} tokens kept in the KV cache, nothing computed"
        self._line(Text.assemble(("suspended  ", "bold yellow"), kept))

    def answered(self, call: Call) -> None:
        """Show what a tool returned."""
        self._line(Text.assemble(("tool       ", "bold cyan"), _plain(call.output)))

    def resumed(self, seconds: float) -> None:
        """Show how long the first new token took."""
        latency = f"first new token {1000 * seconds:,.0f} ms after the append"
        self._line(Text.assemble(("resumed    ", "bold yellow"), latency))

    def finished(self, run: Run) -> None:
        """Say so where the run did not end by itself."""
        if run.status != "completed":
            self._line(Text(f"({run.status}: the segment reached its limit)", style="red"))
        self._end_line()

    def summary(self, runs: Sequence[Run]) -> None:
        """Show the numbers of each run and of all."""
        each = [totals_of(run) for run in runs]
        self._end_line()
        self._console.print()
        self._console.print(totals_table(each))
        self._console.print()
        self._console.print(Text(legend(sum_of(each), runs[0].model)))

    def _line(self, text: Text) -> None:
        self._end_line()
        self._console.print(text, soft_wrap=True)

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._console.print()
            self._is_mid_line = False


def totals_table(each: Sequence[Totals]) -> Table:
    """Return a row for each run, and one for all where there are several."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for number, totals in enumerate(each, start=1):
        table.add_row(str(number), *_cells(totals))
    if len(each) > 1:
        table.add_section()
        table.add_row("total", *_cells(sum_of(each)))
    return table


_HEADINGS = (
    "tokens\nprefilled",
    "tokens\ndecoded",
    "forwarded\nagain",
    "stateless\nprefill",
    "time\nsuspended",
    "resume\nlatency",
    "by the\nserver",
)


def _cells(totals: Totals) -> list[str]:
    return [
        f"{totals.tokens_prefilled:,}",
        f"{totals.tokens_decoded:,}",
        f"{totals.tokens_reforwarded:,}",
        f"{totals.stateless_tokens_prefilled:,}",
        _milliseconds(totals.suspended_seconds),
        _milliseconds(mean(totals.resume_seconds)),
        _milliseconds(mean(totals.server_resume_seconds)),
    ]


def mean(seconds: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return sum(seconds) / len(seconds) if seconds else None


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    digits = 1 if seconds < 0.01 else 0
    return f"{1000 * seconds:,.{digits}f} ms"


def legend(total: Totals, model: str) -> str:
    """Return in words what the table says."""
    ratio = total.stateless_tokens_prefilled / total.tokens_prefilled
    return (
        f"{model} suspended {_times(total.suspensions)} at a call and resumed on the same KV "
        f"cache: {total.tokens_forwarded:,} tokens were forwarded, "
        f"{total.tokens_reforwarded:,} of them again.\n"
        "stateless prefill: what a server that keeps nothing prefills for the same requests, "
        f"{ratio:.1f} times as much.\n"
        "resume latency: append sent to first new token seen; by the server: append received to "
        "token sampled. Means."
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _plain(text: str) -> str:
    """Return ``text`` without what would steer a terminal: it comes from a model or from files."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
