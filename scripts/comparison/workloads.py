"""Agent runs to be compared in: what each of them says, and how many there are at once.

All content is a function of a seed. Synthetic traces vary one thing at a time. Their text is plain
English of words that a tokenizer has as one token each, so that a text of so many tokens can be
written without one.
"""

import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from random import Random
from typing import Any, Literal

import msgspec

from protocol.validation import JsonObject
from sampler.traces import Trace, TraceCall, TraceTurn

CALL_TOKENS = 28
"""What a call of ``FIND`` takes besides its words, in the style of Hermes 2 Pro."""

FIND: JsonObject = {
    "type": "function",
    "name": "find",
    "description": "Find what is known about something",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
INSTRUCTIONS = (
    "You are an agent that works through a task step by step. Find out what you need with the "
    "tool, one thing at a time, and say what came of it at the end."
)
_PROMPT_TOKENS = 120
"""What a prompt takes besides its message: instructions, the tool, headers."""
_QUERY_WORDS = 4


@dataclass(frozen=True)
class Workload:
    """Runs that are held at the same time."""

    label: str
    trace: Trace
    concurrency: int = 1

    def traces(self) -> list[Trace]:
        """Return what each of the runs says, which is something else in each."""
        return [distinct(self.trace, index) for index in range(self.concurrency)]


ToolSeconds = Sequence[float] | Literal["bimodal"]
"""How long the tools take, call by call and then from the first again. ``bimodal``: four of five
calls some hundredths of a second, as to read a file, and the others seconds, as to run tests."""


def synthetic_trace(
    name: str,
    *,
    num_calls: int,
    context_tokens: int,
    result_tokens: int,
    turn_tokens: int = 32,
    tool_seconds: ToolSeconds = (0.0,),
    seed: int = 0,
) -> Trace:
    """Return a run of ``num_calls`` turns with one call each, and an answer.

    Args:
        name: of the trace.
        num_calls: how many.
        context_tokens: about how long the first prompt is, 150 at least.
        result_tokens: about how long each output is.
        turn_tokens: about how long each turn of the model is; a call takes 30 of it.
        tool_seconds: how long the tools run.
        seed: picks the words.
    """
    random = Random(seed)
    seconds = _seconds(tool_seconds, Random(f"seconds {seed}"))
    text_tokens = max(turn_tokens - CALL_TOKENS - _QUERY_WORDS, 0)
    turns = [
        TraceTurn(
            text=prose(random, text_tokens),
            calls=(
                TraceCall(
                    name="find",
                    arguments=json.dumps({"query": _query(random)}),
                    output=prose(random, result_tokens),
                    seconds=next(seconds),
                ),
            ),
        )
        for _ in range(num_calls)
    ]
    return Trace(
        name=name,
        description="Synthetic: plain words, made by scripts/comparison.",
        instructions=INSTRUCTIONS,
        tools=(FIND,),
        input=prose(random, max(context_tokens - _PROMPT_TOKENS, 8)),
        turns=(*turns, TraceTurn(text=prose(random, max(turn_tokens - 1, 2)))),
    )


def _seconds(tool_seconds: ToolSeconds, random: Random) -> Iterator[float]:
    if tool_seconds != "bimodal":
        return cycle(tool_seconds)
    return (
        round(random.uniform(1.0, 3.0) if index % 5 == 4 else random.uniform(0.02, 0.08), 3)
        for index in count()
    )


# --- Plain words ----------------------------------------------------------------------------------

_NOUNS = """
    team order store list paper river market teacher garden window letter road train house town
    story school doctor farmer bridge kitchen engine machine winter summer morning office library
    picture question answer company country village family friend paper report number station
""".split()  # noqa: SIM905 - as a list it would fill a page
_VERBS = """
    keeps moves finds checks needs follows leaves brings opens shows holds changes covers reaches
    meets takes gives wants makes helps
""".split()  # noqa: SIM905
_ADJECTIVES = """
    small large early late new old open quiet public common simple long short clear strong young
    local final single whole
""".split()  # noqa: SIM905
_ENDS = """
    today again outside early together later slowly twice now here
""".split()  # noqa: SIM905


def prose(random: Random, num_tokens: int) -> str:
    """Return plain sentences of about ``num_tokens`` tokens, of which a full stop is one."""
    words: list[str] = []
    while len(words) < num_tokens:
        words += _sentence(random)
    return " ".join(words[:num_tokens]).replace(" .", ".")


def _sentence(random: Random) -> list[str]:
    return [
        *("The", random.choice(_ADJECTIVES), random.choice(_NOUNS), random.choice(_VERBS)),
        *("the", random.choice(_NOUNS), "of", "the", random.choice(_NOUNS)),
        *(random.choice(_ENDS), "."),
    ]


def _query(random: Random) -> str:
    words = [random.choice(_ADJECTIVES), random.choice(_NOUNS), "near", random.choice(_NOUNS)]
    return " ".join(words)


# --- The same in other words ----------------------------------------------------------------------

_WORD = re.compile(r"(?<![A-Za-z0-9])[a-z]{3,}(?![A-Za-z0-9])")
_KEPT = frozenset(keyword.kwlist)
"""Words that stay: with others in their place, code would be of other lengths in tokens."""


def distinct(trace: Trace, index: int) -> Trace:
    """Return ``trace`` in other words, but for its instructions and tools; 0 is the trace itself.

    Its words change places with others of their length, so each text is about as long as it was.
    Runs of one product have that in common: of their prompts only the beginning is the same.
    """
    if index == 0:
        return trace
    reword = _rewording(trace, index)
    items = trace.input
    return msgspec.structs.replace(
        trace,
        name=f"{trace.name}-{index}",
        input=f"Task {index}. {reword(items)}"
        if isinstance(items, str)
        else _in_items(items, reword),
        turns=tuple(_reworded(turn, reword) for turn in trace.turns),
    )


Reword = Callable[[str], str]


def _rewording(trace: Trace, index: int) -> Reword:
    random = Random(f"{trace.name} {index}")
    others: dict[str, str] = {}
    words = sorted(set(_WORD.findall(" ".join(_texts(trace)))) - _KEPT)
    for length in {len(word) for word in words}:
        alike = [word for word in words if len(word) == length]
        others |= zip(alike, random.sample(alike, len(alike)), strict=True)
    return lambda text: _WORD.sub(lambda found: others.get(found[0], found[0]), text)


def _texts(trace: Trace) -> Iterator[str]:
    """Give all that a trace says, as far as it can be said in other words."""
    if isinstance(trace.input, str):
        yield trace.input
    for turn in trace.turns:
        yield turn.text
        for call in turn.calls:
            yield call.output
            yield call.input or ""


def _reworded(turn: TraceTurn, reword: Reword) -> TraceTurn:
    return TraceTurn(
        text=reword(turn.text),
        calls=tuple(_reworded_call(call, reword) for call in turn.calls),
        messages=_in_items(turn.messages, reword),
    )


def _reworded_call(call: TraceCall, reword: Reword) -> TraceCall:
    return TraceCall(
        name=call.name,
        arguments=call.arguments and _in_arguments(call.arguments, reword),
        input=call.input and reword(call.input),
        output=reword(call.output),
        seconds=call.seconds,
    )


def _in_arguments(arguments: str, reword: Reword) -> str:
    return json.dumps(_in_values(json.loads(arguments), reword), ensure_ascii=False)


def _in_values(value: Any, reword: Reword) -> Any:
    """Return JSON with other words in its strings, but for the names of members."""
    match value:
        case str():
            return reword(value)
        case list():
            return [_in_values(member, reword) for member in value]
        case dict():
            return {name: _in_values(member, reword) for name, member in value.items()}
        case _:
            return value


_SAID = ("content", "text", "output")


def _in_items(items: Iterable[JsonObject], reword: Reword) -> tuple[JsonObject, ...]:
    """Return items with other words in what they say."""
    return tuple(
        {name: _said(value, reword) if name in _SAID else value for name, value in item.items()}
        for item in items
    )


def _said(value: Any, reword: Reword) -> Any:
    if isinstance(value, list):
        return list(_in_items(value, reword))
    return reword(value) if isinstance(value, str) else value
