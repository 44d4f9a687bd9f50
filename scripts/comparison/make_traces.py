"""Write the traces that are shipped: ``python -m scripts.comparison.make_traces``.

Each is made of material as its kind of agent meets it, put together by fixed seeds: the same files
every time. Their shape follows what is published of agents in use, at a tenth to a twentieth of
their contexts, so that they fit the 8,192 tokens of the default model. ``docs/traces.md`` says how
close they come.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from protocol.items import CallOutput, parse_items
from protocol.tools import callable_tools, parse_tools
from protocol.validation import JsonObject
from sampler.chat_template import ChatFormat
from sampler.conversation import Conversation
from sampler.engines.simulated.model import simulated_model
from sampler.replay import Replays
from sampler.tokenizer import Tokenizer
from sampler.traces import Trace, TraceCall, TraceTurn, write_traces

FOLDER = Path(__file__).parent / "traces"


def main() -> None:
    """Write the files and print what they come to."""
    model = simulated_model()
    for trace in shipped_traces():
        write_traces(FOLDER / f"{trace.name}.jsonl", [trace])
        figures = figures_of(trace, model.tokenizer, model.chat_format)
        print(
            f"{trace.name}: {figures.num_turns} turns, {figures.context_tokens} tokens, "
            f"input to output {figures.input_to_output:.0f}, reuse {figures.prefix_reuse:.2f}, "
            f"pauses {figures.pause_share(200, 1200):.2f}"
        )


def shipped_traces() -> list[Trace]:
    """Return the traces, as they are made."""
    return [coding_agent(), retrieval(), many_small_calls()]


def _function(name: str, description: str, /, **parameters: str) -> JsonObject:
    """Return a declaration of a function all of whose parameters are required."""
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {
                parameter: {"type": "string", "description": described}
                for parameter, described in parameters.items()
            },
            "required": list(parameters),
            "additionalProperties": False,
        },
        "strict": True,
    }


def _turn(name: str, output: str, seconds: float, /, **arguments: str) -> TraceTurn:
    """Return a turn with one call of a function."""
    said = json.dumps(arguments, ensure_ascii=False)
    call = TraceCall(name=name, arguments=said, output=output, seconds=round(seconds, 3))
    return TraceTurn(calls=(call,))


# --- A coding agent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Defect:
    """A module with a mistake in it, which a test tells of."""

    module: str
    record: str
    fields: tuple[str, ...]
    function: str
    signature: str
    purpose: str
    wrong: str
    right: str
    case: str
    found: str
    expected: str


_DEFECTS = (
    _Defect(
        "currency", "Rate", ("code: str", "value: Decimal", "day: date"),
        "convert", "amount: Decimal, rate: Rate", "Return an amount in the currency of the books.",
        "return amount / rate.value",
        "return (amount / rate.value).quantize(CENT, ROUND_HALF_EVEN)",
        "convert(Decimal(10), EUR)", "Decimal('9.259259259259259259259259259')", "Decimal('9.26')",
    ),
    _Defect(
        "invoice", "Line", ("text: str", "price: Decimal", "count: int"),
        "total", "lines: Iterable[Line]", "Return what a customer has to pay.",
        "return sum((line.price for line in lines), ZERO)",
        "return sum((line.price * line.count for line in lines), ZERO)",
        "total([Line('bolt', Decimal(5), 6)])", "Decimal('5')", "Decimal('30')",
    ),
    _Defect(
        "schedule", "Due", ("number: str", "day: date", "grace: timedelta"),
        "is_overdue", "due: Due, today: date", "Tell whether a payment is late.",
        "return due.day <= today",
        "return due.day + due.grace < today",
        "is_overdue(DUE_TODAY, TODAY)", "True", "False",
    ),
    _Defect(
        "matching", "Payment", ("reference: str", "amount: Decimal", "day: date"),
        "find_match", "payment: Payment, items: Sequence[Item]", "Return what a payment settles.",
        "return next((i for i in items if i.reference == payment.reference), None)",
        "return next((i for i in items if _key(i.reference) == _key(payment.reference)), None)",
        "find_match(PAYMENT, [Item('re-1044')])", "None", "Item(reference='re-1044')",
    ),
    _Defect(
        "statement", "Entry", ("day: date", "number: int", "amount: Decimal"),
        "in_order", "entries: Iterable[Entry]", "Return entries as a statement lists them.",
        "return sorted(entries, key=lambda entry: entry.day)",
        "return sorted(entries, key=lambda entry: (entry.day, entry.number))",
        "[entry.number for entry in in_order(SAME_DAY)]", "[3, 1, 2]", "[1, 2, 3]",
    ),
    _Defect(
        "export", "Row", ("account: str", "debit: Decimal", "credit: Decimal"),
        "write_rows", "rows: Sequence[Row], path: Path", "Write rows as CSV and count them.",
        "return sum(writer.writerow(astuple(row)) > 0 for row in rows[1:])",
        "return sum(writer.writerow(astuple(row)) > 0 for row in rows)",
        "write_rows(ROWS, path)", "2", "3",
    ),
    _Defect(
        "limits", "Limit", ("customer: str", "amount: Decimal", "until: date"),
        "remaining", "limit: Limit, spent: Decimal", "Return what a customer may still order.",
        "return limit.amount - spent",
        "return max(limit.amount - spent, ZERO)",
        "remaining(LIMIT, Decimal(120))", "Decimal('-20')", "Decimal('0')",
    ),
)  # fmt: skip

_CODING_TOOLS = (
    _function("read", "Read a text file of the repository.", path="From the root on."),
    _function("search", "Find lines in all files.", text="What they contain, as it is."),
    _function("run", "Run a command in a shell and return what it prints.", command="In bash."),
    {
        "type": "custom",
        "name": "patch",
        "description": "Change files: *** Begin Patch, *** Update File: PATH, @@, lines that "
        "begin with - or +, *** End Patch.",
    },
)
_CODING_INSTRUCTIONS = """\
You are a coding agent in a checked-out repository. Work on the task until it is done.

- Look before you edit: read the code and its tests.
- Change as little as will do, in the style that is there.
- Run the tests of what you changed after each change, and all tests at the end.
- Do not commit. Do not touch files that have nothing to do with the task.
- When all is done, say in a few sentences what was wrong and what you changed."""
_CODING_TASK = """\
Since the move to Python 3.12 the nightly job of `ledger` fails. Seven tests are red, one in \
each of the modules currency, invoice, schedule, matching, statement, export and limits. The \
tests are right. Please fix the modules one after the other, and see that `make lint` \
stays happy."""
_CODING_ANSWER = """\
All seven modules are fixed and the whole suite passes. Amounts in other currencies are rounded \
to cents; invoices count the number of pieces; the days of grace count before a payment is \
late; references are compared without regard to case; entries of one day keep their numbers' \
order; the export no longer drops the first row; and what remains of a limit is never negative."""


def coding_agent() -> Trace:
    """Return a run of 43 turns that fixes a small library."""
    random = Random(43)
    turns = [turn for defect in _DEFECTS for turn in _fixing(defect, random)]
    return Trace(
        name="coding-agent",
        description="Fixes seven modules of a library: searches, reads, runs tests, edits.",
        instructions=_CODING_INSTRUCTIONS,
        tools=_CODING_TOOLS,
        input=_CODING_TASK,
        turns=(*turns, TraceTurn(text=_CODING_ANSWER)),
    )


def _fixing(defect: _Defect, random: Random) -> Iterator[TraceTurn]:
    path, test = f"ledger/{defect.module}.py", f"tests/test_{defect.module}.py"

    def quick() -> float:
        return random.uniform(0.02, 0.09)

    def testing() -> float:
        return random.uniform(0.4, 0.9)

    command = f"pytest -q {test}"
    yield _turn("run", _failing(defect, random), testing(), command=command)
    yield _turn("read", _source(defect), quick(), path=path)
    yield _turn("search", _mentions(defect, random), quick(), text=f"{defect.function}(")
    patch = TraceCall(
        name="patch",
        input=f"*** Begin Patch\n*** Update File: {path}\n@@\n-    {defect.wrong}\n"
        f"+    {defect.right}\n*** End Patch",
        output=f"Success. Updated the following files:\nM {path}",
        seconds=round(quick(), 3),
    )
    yield TraceTurn(calls=(patch,))
    yield _turn("run", _passing(random), testing(), command=command)
    yield _turn("run", _clean(defect, random), testing(), command="make lint")


def _failing(defect: _Defect, random: Random) -> str:
    passed = random.randrange(3, 9)
    return (
        f"{'.' * passed}F{' ' * 20}[100%]\n"
        "============ FAILURES ============\n"
        f"________ test_{defect.function} ________\n\n"
        f"    def test_{defect.function}():\n"
        f'        """{defect.purpose}"""\n'
        f">       assert {defect.case} == {defect.expected}\n"
        f"E       AssertionError: assert {defect.found} == {defect.expected}\n"
        f"E        +  where {defect.found} = {defect.case}\n\n"
        f"tests/test_{defect.module}.py:{random.randrange(24, 80)}: AssertionError\n"
        "============ short test summary info ============\n"
        f"FAILED tests/test_{defect.module}.py::test_{defect.function}\n"
        f"1 failed, {passed} passed in 0.{random.randrange(20, 90)}s"
    )


def _source(defect: _Defect) -> str:
    fields = "\n".join(f"    {field}" for field in defect.fields)
    first = defect.fields[0].partition(":")[0]
    return (
        f'"""{defect.record}s of the ledger."""\n\n'
        "from collections.abc import Iterable, Sequence\n"
        "from dataclasses import dataclass\n"
        "from datetime import date, timedelta\n"
        "from decimal import ROUND_HALF_EVEN, Decimal\n\n"
        'CENT = Decimal("0.01")\n'
        "ZERO = Decimal(0)\n\n\n"
        "@dataclass(frozen=True)\n"
        f"class {defect.record}:\n"
        f'    """A {defect.record.lower()} as it is in the books."""\n\n'
        f"{fields}\n\n"
        f"    def __str__(self) -> str:\n"
        f'        return f"{defect.record} {{self.{first}}}"\n\n\n'
        f"def {defect.function}({defect.signature}):\n"
        f'    """{defect.purpose}"""\n'
        f"    {defect.wrong}\n\n\n"
        f"def _key(text: str) -> str:\n"
        '    """Return what two spellings of a reference have in common."""\n'
        '    return text.strip().replace("-", "").casefold()\n'
    )


def _mentions(defect: _Defect, random: Random) -> str:
    callers = random.sample(["nightly", "report", "api", "close_month", "reminder"], 2)
    found = [
        (f"ledger/{defect.module}.py", f"def {defect.function}({defect.signature}):"),
        *((f"ledger/{name}.py", f"    found = {defect.function}(item, book)") for name in callers),
        (f"tests/test_{defect.module}.py", f"    assert {defect.case} == {defect.expected}"),
    ]
    return "\n".join(f"{path}:{random.randrange(10, 90)}:{line}" for path, line in found)


def _passing(random: Random) -> str:
    number = random.randrange(4, 10)
    return f"{'.' * number}{' ' * 20}[100%]\n{number} passed in 0.{random.randrange(20, 90)}s"


def _clean(defect: _Defect, random: Random) -> str:
    return (
        "ruff check ledger tests\nAll checks passed!\n"
        "ruff format --check ledger tests\n"
        f"{random.randrange(40, 60)} files already formatted\n"
        f"mypy ledger/{defect.module}.py\n"
        f"Success: no issues found in {random.randrange(9, 30)} source files"
    )


# --- Retrieval ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Page:
    """A page of a handbook: what it is about, and the figures in it."""

    subject: str
    query: str
    who: str
    office: str
    fee: int
    days: int


_PAGES = (
    _Page("group tickets", "price for a group of twelve", "a group", "the group desk", 38, 14),
    _Page("bicycles on trains", "taking four bicycles", "a traveller with a bicycle",
          "the luggage office", 6, 2),
    _Page("connections that are missed", "missed connection at Lund", "a traveller who misses "
          "a train", "the service point", 0, 2),
    _Page("refunds after a delay", "refund after ninety minutes", "a traveller who arrives late",
          "the claims team", 15, 30),
    _Page("seats that are booked", "reserving seats together", "a group with seats",
          "the booking centre", 4, 10),
    _Page("travel with children", "children under twelve in a group", "a family",
          "the family desk", 9, 5),
    _Page("large luggage", "luggage beyond two pieces", "a traveller with luggage",
          "the luggage office", 11, 3),
    _Page("replacement buses", "bus between Harwick and Lund in May", "a traveller on a bus",
          "the control room", 0, 7),
    _Page("changes of a booking", "changing the day of a group ticket", "the holder of a ticket",
          "the booking centre", 12, 3),
    _Page("help at the station", "help with boarding at Harwick", "a traveller who needs help",
          "the station master", 0, 2),
    _Page("cross-border journeys", "group ticket across the border", "a traveller abroad",
          "the international desk", 21, 21),
)  # fmt: skip

_RETRIEVAL_TOOLS = (
    _function("look_up", "Return the page of the handbook that fits best.", query="In words."),
)
_RETRIEVAL_INSTRUCTIONS = """\
You answer questions of a railway's staff from its handbook, and from nothing else. Look up \
each thing that matters before you answer. Name the pages that you rely on, and say so where \
they leave something open."""
_RETRIEVAL_TASK = """\
A group of twelve, two of them children, wants to go from Harwick to Lund and on across the \
border on 14 May, with four bicycles and a lot of luggage, and come back a day later than they \
have booked. There is work on the line. What do they need, what does it cost, and what if they \
miss the connection?"""
_RETRIEVAL_ANSWER = """\
They need a group ticket with the supplement for journeys across the border, ordered at the \
group desk three weeks ahead; four bicycle tickets from the luggage office; and seats, which \
are booked for the group as a whole. The two children travel at the family rate. The change of \
the return costs 12 once for all. During the work on the line a bus takes them to Lund: it \
takes no bicycles without notice, so the control room has to be told seven days before. If they \
miss the connection, the service point puts them on the next train without a fee, and a refund \
is due from ninety minutes on. Pages: group tickets, bicycles on trains, cross-border journeys, \
replacement buses, changes of a booking, missed connections. Open remains whether luggage \
beyond two pieces is taken by the bus."""


def retrieval() -> Trace:
    """Return a run of 12 turns that reads a page of a handbook in each but the last."""
    random = Random(12)
    turns = [
        _turn("look_up", _page_text(page, random), random.uniform(0.3, 0.9), query=page.query)
        for page in _PAGES
    ]
    return Trace(
        name="retrieval",
        description="Answers a question from eleven pages of a handbook.",
        instructions=_RETRIEVAL_INSTRUCTIONS,
        tools=_RETRIEVAL_TOOLS,
        input=_RETRIEVAL_TASK,
        turns=(*turns, TraceTurn(text=_RETRIEVAL_ANSWER)),
    )


def _page_text(page: _Page, random: Random) -> str:
    sentences = _sentences(page)
    chosen = sentences[:3] + random.sample(sentences[3:], random.randrange(9, len(sentences) - 2))
    first, second = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    section = random.randrange(2, 9)
    return (
        f"# {page.subject.capitalize()}\n\nHandbook, section {section}. Valid from 1 March.\n\n"
        f"## Rules\n\n{' '.join(first)}\n\n## In practice\n\n{' '.join(second)}"
    )


def _sentences(page: _Page) -> list[str]:
    fee = f"a fee of {page.fee}" if page.fee else "no fee"
    who = page.who[0].upper() + page.who[1:]
    office = page.office[0].upper() + page.office[1:]
    return [
        f"This page holds for {page.subject} on all lines of the company, and for the partners "
        "that are named in the appendix.",
        f"For {page.who} there is {fee}, whatever the distance.",
        f"What is wanted has to be told to {page.office} at least {page.days} days before the "
        "day of travel; later requests are taken where there is room.",
        f"{office} answers in writing. Until the answer has come, nothing is promised, and staff "
        "on the train cannot promise it either.",
        f"{who} shows the confirmation together with the ticket. A picture of it on a telephone "
        "is enough, as long as the number can be read.",
        f"Between six and nine in the morning on working days, {page.subject} come second to "
        "commuters: the guard may ask to wait for the next train.",
        "Trains with fewer than four coaches are marked in the timetable. On those, places are "
        "given in the order in which requests came in.",
        f"If a train is cancelled, everything that was agreed holds for the next one, and "
        f"{page.office} is told by the control room without being asked.",
        "Complaints go to the office that decided, and only after that to the ombudsman; both "
        "answer within thirty days.",
        f"Staff note the case under {page.subject} in the log of the shift, with the number of the "
        "train and the station, so that it can be counted at the end of the quarter.",
        "Children under six count neither as travellers nor towards the size of a group. From six "
        "to fourteen they pay half of what an adult pays.",
        f"In the summer timetable {page.office} is open on Sundays as well, from ten to four. On "
        "public holidays it can be reached by telephone only.",
        f"The company may end an offer for {page.subject} with notice of three months. What was "
        "confirmed before that stays as it was.",
        "During work on the line a bus replaces the train. It stops in front of the station and "
        "waits for connections for ten minutes at most.",
        f"Earlier rules for {page.subject}, among them the circular of the year before last, are "
        "no longer of use and should be taken off the notice boards.",
        "Where a journey goes on abroad, the rules of the other railway hold from the border on, "
        "and its prices are added to ours, rounded to the next whole amount.",
    ]


# --- Many small calls -----------------------------------------------------------------------------

_GREENHOUSE_TOOLS = (
    _function("get", "Read a sensor.", name="Such as north.soil."),
    _function("set", "Set a valve or a vent.", name="Such as north.valve.", to="Percent open."),
)
_GREENHOUSE_INSTRUCTIONS = """\
You run a greenhouse. Read sensors one at a time, set valves and vents as the rules say, and \
read again what you have changed. Soil below 30: valve to 40. Air above 28: vent to 60. Light \
below 200: leave it, and say so."""
_GREENHOUSE_TASK = "Please make the round through the beds, and tell me what you changed."
_GREENHOUSE_ANSWER = """\
The round is done. Where the soil was dry the valves are at 40 now, and where the air was hot \
the vents are at 60; all other beds were in order and I left them as they were."""
_BEDS = """
    north south east west upper lower front back left right centre corner inner outer
""".split()  # noqa: SIM905 - as a list it would fill a page


def many_small_calls() -> Trace:
    """Return a run of 60 turns whose outputs are a few tokens long."""
    random = Random(60)
    turns = [turn for bed in _BEDS for turn in _round(bed, random)]
    return Trace(
        name="many-small-calls",
        description="Reads sensors of a greenhouse, and sets valves.",
        instructions=_GREENHOUSE_INSTRUCTIONS,
        tools=_GREENHOUSE_TOOLS,
        input=_GREENHOUSE_TASK,
        turns=(*turns[:59], TraceTurn(text=_GREENHOUSE_ANSWER)),
    )


def _round(bed: str, random: Random) -> Iterator[TraceTurn]:
    def soon() -> float:
        return random.uniform(0.05, 0.25)

    soil, air = random.randrange(18, 60), random.randrange(19, 34)
    yield _turn("get", f"{soil}", soon(), name=f"{bed}.soil")
    if soil < 30:
        yield _turn("set", "ok", soon(), name=f"{bed}.valve", to="40")
        yield _turn("get", f"{soil + random.randrange(3, 9)}", soon(), name=f"{bed}.soil")
    yield _turn("get", f"{air}", soon(), name=f"{bed}.air")
    if air > 28:
        yield _turn("set", "ok", soon(), name=f"{bed}.vent", to="60")
        yield _turn("get", f"{air - random.randrange(1, 5)}", soon(), name=f"{bed}.air")
    yield _turn("get", f"{random.randrange(150, 900)}", soon(), name=f"{bed}.light")


# --- What they come to ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What is published of agents in use, of one trace."""

    contexts: tuple[int, ...]
    """The tokens that each turn goes on from."""
    said: tuple[int, ...]
    """The tokens that each turn samples."""
    tool_seconds: float

    @property
    def num_turns(self) -> int:
        return len(self.said)

    @property
    def context_tokens(self) -> int:
        """The whole conversation at its end."""
        return self.contexts[-1] + self.said[-1]

    @property
    def input_tokens(self) -> int:
        """The contexts of all turns together."""
        return sum(self.contexts)

    @property
    def output_tokens(self) -> int:
        """What the model says in all turns together."""
        return sum(self.said)

    @property
    def reread_tokens(self) -> int:
        """Those of the input that were in the context of the turn before, or said in it."""
        return sum(self.contexts[:-1]) + sum(self.said[:-1])

    @property
    def input_to_output(self) -> float:
        return self.input_tokens / self.output_tokens

    @property
    def prefix_reuse(self) -> float:
        """The share of input that need not be read again."""
        return self.reread_tokens / self.input_tokens

    def pause_share(self, decode_rate: float, prefill_rate: float) -> float:
        """Return the share of the time in which tools run, beside a model of so many tokens a
        second that reads nothing twice."""
        read = self.context_tokens - self.output_tokens
        busy = self.output_tokens / decode_rate + read / prefill_rate
        return self.tool_seconds / (self.tool_seconds + busy)


def figures_of(trace: Trace, tokenizer: Tokenizer, chat_format: ChatFormat) -> Figures:
    """Return the figures of ``trace`` in the tokens of a model."""
    replays = Replays([trace], tokenizer, chat_format)
    said = [len(replays.turn_ids(trace.name, index)) for index in range(len(trace.turns))]
    contexts = [len(chat_format.prompt_ids(_opening(trace)))]
    for length, suffix_length in zip(said, _suffix_lengths(trace, chat_format), strict=False):
        contexts.append(contexts[-1] + length + suffix_length)
    seconds = sum(call.seconds for turn in trace.turns for call in turn.calls)
    return Figures(tuple(contexts), tuple(said), seconds)


def _opening(trace: Trace) -> Conversation:
    items = trace.input if isinstance(trace.input, str) else list(trace.input)
    tools = callable_tools(parse_tools(list(trace.tools)))
    return Conversation(parse_items(items), trace.instructions, tools)


def _suffix_lengths(trace: Trace, chat_format: ChatFormat) -> Iterator[int]:
    for turn in trace.turns[:-1]:
        calls = turn.call_items()
        outputs = [
            CallOutput(item.call_id, call.output)
            for item, call in zip(calls, turn.calls, strict=True)
        ]
        following = [*outputs, *parse_items(list(turn.messages))]
        yield len(chat_format.suffix_ids(calls, following))


if __name__ == "__main__":
    main()
