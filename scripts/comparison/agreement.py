"""Whether the designs sample the same tokens: nothing is replayed, the model says what it says.

The server runs in exact mode. Each turn is made to call, and a call brings a note: a string long
enough for its sampled tokens to be others than a tokenizer would choose for the text. Who keeps no
tokens reads its history in the tokenizer's own way, so its context may drift from what was sampled,
and with it what is sampled next. That is a finding and no failure. What differs after that is
another run, and is not compared. In designs that keep their tokens nothing may differ: float32
leaves no room for it.

An inject has no place for a tool choice, and the response that it goes into tells of its tokens at
its end. So only the first turn of such a run is made to call; then the model goes on as it likes,
until it calls no more. It is compared with a run that outputs are appended to in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from protocol.validation import JsonObject
from scripts.comparison.agents import (
    CompareError,
    Endpoint,
    Heard,
    Question,
    client_of,
    reports,
)
from scripts.comparison.results import Agreement, Design

REFERENCE = Design.SUSPENDED
KEEP_TOKENS = (
    Design.SUSPENDED_AGAIN,
    Design.SUSPENDED_INJECT,
    Design.CHAINED,
    Design.STATELESS_CACHE,
)
"""Those whose context is what was sampled, so that all of it has to be as in the suspended run."""
DESIGNS = (*KEEP_TOKENS, Design.STATELESS)

_TOOL: JsonObject = {
    "type": "function",
    "name": "write_note",
    "description": "Write a note about what is to be done next, and why",
    "parameters": {
        "type": "object",
        "properties": {"note": {"type": "string", "pattern": "^[A-Za-z0-9 ,.:;!?'-]{80,120}$"}},
        "required": ["note"],
    },
}
_QUESTIONS = (
    "Plan a walk through an old harbour town, and take notes of what to see.",
    "Find out why the nightly build fails, and note each thing that you try.",
    "Compare three ways to store logs, and write down what speaks for each.",
)
_MAX_TURN_TOKENS = 240
"""Enough for a call, even where each character of it takes a token; a text may be cut."""
_MOST_FREE_TURNS = 20


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen."""

    name: str
    temperature: float


GREEDY = Sampler("greedy", 0.0)
WARM = Sampler("temperature 0.7", 0.7)


@dataclass(frozen=True)
class SampledTurn:
    """The tokens of one turn."""

    token_ids: tuple[int, ...]
    context_digest: str
    """Of the tokens that it was sampled after."""


Run = Sequence[SampledTurn]


# --- Comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How a run compares with another one, up to the first turn that differs."""

    num_turns: int
    num_tokens: int
    is_equal: bool
    drifted_turns: int
    differing_tokens: int


def difference(run: Run, reference: Run) -> Difference:
    """Compare ``run`` with what it should be."""
    num_turns = num_tokens = drifted = 0
    for turn, wanted in zip(run, reference, strict=True):
        num_turns += 1
        num_tokens += len(turn.token_ids)
        drifted += turn.context_digest != wanted.context_digest
        if turn.token_ids != wanted.token_ids:
            pairs = zip_longest(turn.token_ids, wanted.token_ids)
            return Difference(num_turns, num_tokens, False, drifted, sum(a != b for a, b in pairs))
    return Difference(num_turns, num_tokens, True, drifted, 0)


def agreement(design: Design, sampler: Sampler, differences: Sequence[Difference]) -> Agreement:
    """Return how the runs of a design compare with the suspended ones, all together."""
    return Agreement(
        design=design,
        sampler=sampler.name,
        num_runs=len(differences),
        num_turns=sum(each.num_turns for each in differences),
        num_tokens=sum(each.num_tokens for each in differences),
        equal_runs=sum(each.is_equal for each in differences),
        drifted_turns=sum(each.drifted_turns for each in differences),
        differing_tokens=sum(each.differing_tokens for each in differences),
    )


def disagrees(found: Agreement) -> bool:
    """Tell whether tokens differ that have to be the same."""
    is_same = found.equal_runs == found.num_runs and found.drifted_turns == 0
    return found.design in KEEP_TOKENS and not is_same


# --- Sampling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much is sampled."""

    num_turns: int
    """Of a run each of whose turns is made to call."""
    num_greedy: int
    num_warm: int

    def runs(self) -> Iterator[tuple[Sampler, int]]:
        """Give the sampler and the seed of each run."""
        yield from ((GREEDY, seed) for seed in range(self.num_greedy))
        yield from ((WARM, seed) for seed in range(self.num_warm))

    def num_runs(self, designs: Sequence[Design]) -> int:
        """Return how many runs are held in all."""
        references = {_is_free(design) for design in designs}
        return (len(references) + len(designs)) * (self.num_greedy + self.num_warm)


FULL = Plan(num_turns=5, num_greedy=3, num_warm=5)
QUICK = Plan(num_turns=2, num_greedy=1, num_warm=1)


async def measure_agreement(
    endpoint: Endpoint,
    plan: Plan,
    designs: Sequence[Design] = DESIGNS,
    begun: Callable[[Design], None] = lambda design: None,
) -> list[Agreement]:
    """Sample the same runs in each design, and compare them with the suspended ones.

    Args:
        endpoint: of a server in exact mode.
        plan: how many, and how long.
        designs: that are compared, of ``DESIGNS``.
        begun: is told in which design the next run is held.

    Raises:
        CompareError: the server refused or failed, or tells no tokens.
    """
    differences: dict[tuple[Sampler, Design], list[Difference]] = {}
    for sampler, seed in plan.runs():
        references: dict[int | None, Run] = {}
        for design in designs:
            num_turns = None if _is_free(design) else plan.num_turns
            if num_turns not in references:
                begun(REFERENCE)
                references[num_turns] = await sampled_run(
                    REFERENCE, endpoint, sampler, seed, num_turns
                )
            begun(design)
            run = await sampled_run(design, endpoint, sampler, seed, num_turns)
            found = differences.setdefault((sampler, design), [])
            found.append(difference(run, references[num_turns]))
    return [agreement(design, sampler, each) for (sampler, design), each in differences.items()]


def _is_free(design: Design) -> bool:
    """Tell whether a client of ``design`` cannot make a later turn call."""
    return design is Design.SUSPENDED_INJECT


async def sampled_run(
    design: Design, endpoint: Endpoint, sampler: Sampler, seed: int, num_turns: int | None
) -> list[SampledTurn]:
    """Hold a run and return its tokens.

    Args:
        design: in which it is held.
        endpoint: of a server in exact mode.
        sampler: of its tokens.
        seed: of the sampler, and of what is asked.
        num_turns: each of which is made to call; None for a run of which only the first is, and
            which goes on until the model does not call.

    Raises:
        CompareError: the server refused or failed, or tells no tokens, or the model has not come to
            an end.
    """
    members = {
        "temperature": sampler.temperature,
        "seed": seed,
        "max_output_tokens": _MAX_TURN_TOKENS,
        "tools": [_TOOL],
        "parallel_tool_calls": False,
        "store": False,
        "include": ["suspend:token_ids"],
    }
    question = _QUESTIONS[seed % len(_QUESTIONS)]
    items: list[JsonObject] = [{"type": "message", "role": "user", "content": question}]
    heard: list[Heard] = []
    async with client_of(design, endpoint, members) as client:
        while len(heard) != num_turns:
            is_forced = num_turns is not None or not heard
            choice: JsonObject = {"tool_choice": "required"} if is_forced else {}
            heard.append(await client.ask(Question(items, 1, choice, may_be_cut=not is_forced)))
            if not is_forced and not heard[-1].calls:
                break
            if len(heard) == _MOST_FREE_TURNS:
                raise CompareError(f"the model calls in each of {len(heard)} turns")
            items = [_output(heard[-1], len(heard))]
    return [_sampled(report) for report in reports(design, heard)]


def _sampled(report: JsonObject) -> SampledTurn:
    try:
        tokens = report["token_ids"]
    except KeyError as error:
        raise CompareError(f"the server tells no tokens: there is no {error}") from None
    return SampledTurn(tuple(tokens["sampled"]), tokens["context_digest"])


def _output(heard: Heard, number: int) -> JsonObject:
    if len(heard.calls) != 1:
        raise CompareError(f"expected a call, got {len(heard.calls)}")
    text = f"Note {number} is saved. What is next?"
    return {
        "type": "function_call_output",
        "call_id": heard.calls[0]["call_id"],
        "output": text,
    }
