"""How much is done around inference for one run, in each design: exact counts, and no times.

The run has ten calls, one a turn, so eleven turns of the model. The whole conversation is a
question, ten calls, ten outputs and an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import pytest_asyncio

from server.access import add_api_key
from server.ledger import Total, read_totals
from server.safety import PASSED, Direction, Verdict
from server.settings import Settings
from server.work import Stage
from tests.server.designs import ANSWER, QUESTION, SUSPENDED, Design, hold
from tests.server.models import BOTH, OSLO
from tests.server.running import Event, calls_in, output, serving, suspended

pytestmark = pytest.mark.slow  # of the five runs that all tests look at

NUM_CALLS = 10
NUM_TURNS = NUM_CALLS + 1
NUM_NEW_ITEMS = 1 + NUM_CALLS
"""What a client says: the question, and the outputs."""
NUM_RESENT_ITEMS = sum(1 + 2 * turn for turn in range(NUM_TURNS))
"""What it says where it sends all again: before each turn the question, and for each turn so far a
call and its output. That is the square of the number of turns."""

ARGUMENTS = '{"city": "Oslo"}'
SAID = [ARGUMENTS] * NUM_CALLS + ["Sun."]

Counts = Mapping[str, float]


class CountingClassifier:
    """Lets everything pass, and keeps what it was given."""

    name = "counting"
    texts: ClassVar[list[tuple[Direction, str]]] = []

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        self.texts.extend((direction, text) for text in texts)
        return [PASSED] * len(texts)


@dataclass(frozen=True)
class HeldRun:
    """A run, and what was counted while it was held."""

    responses: Sequence[Event]
    counts: Counts
    """By the names of ``/metrics``."""
    classified: Sequence[tuple[Direction, str]]
    totals: Sequence[Total]
    """What the ledger has in the end."""

    def runs_of(self, stage: Stage) -> float:
        """Return how often the server went through ``stage``."""
        return self.counts[f"suspend_stage_runs_total{{{stage.value}}}"]

    def items_of(self, stage: Stage) -> float:
        """Return with how many items it did."""
        return self.counts[f"suspend_stage_items_total{{{stage.value}}}"]


MODELS = """
default = "either"

[split.either]
tiny = 1
other = 1

[model.other]
of = "tiny"
"""


async def held_run(design: Design, folder: Path) -> HeldRun:
    """Hold the run on a server of its own."""
    CountingClassifier.texts.clear()
    settings = Settings(data_dir=folder, safety=f"{__name__}:{CountingClassifier.__name__}")
    async with serving(*[OSLO] * NUM_CALLS, "Sun.", settings=settings) as server:
        before = await server.metrics()
        responses = await hold(server, design)
        after = await server.metrics()
    counts = {name: value - before.get(name, 0) for name, value in after.items()}
    return HeldRun(responses, counts, [*CountingClassifier.texts], read_totals(folder))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def held() -> Mapping[Design, HeldRun]:
    """The run in each design."""
    runs = {}
    for design in Design:
        with TemporaryDirectory() as folder:
            runs[design] = await held_run(design, Path(folder))
    return runs


def tokens_in(response: Event) -> int:
    """Return how long the conversation is with what ``response`` says."""
    return int(response["usage"]["total_tokens"])


every_design = pytest.mark.parametrize("design", Design, ids=lambda design: design.value)


# --- Before inference ----------------------------------------------------------------------------


@every_design
def test_each_frame_or_request_is_parsed(design: Design, held: Mapping[Design, HeldRun]) -> None:
    assert held[design].runs_of(Stage.PARSE) == NUM_TURNS


@pytest.mark.parametrize(
    ("design", "num_items"),
    [
        (Design.APPEND, NUM_NEW_ITEMS),
        (Design.INJECT, NUM_NEW_ITEMS),
        (Design.CHAINED, NUM_NEW_ITEMS),
        (Design.CACHED, NUM_RESENT_ITEMS),
        (Design.STATELESS, NUM_RESENT_ITEMS),
    ],
)
@pytest.mark.parametrize("stage", [Stage.PARSE, Stage.CLASSIFY_INPUT])
def test_what_is_sent_again_is_validated_and_classified_again(
    stage: Stage, design: Design, num_items: int, held: Mapping[Design, HeldRun]
) -> None:
    assert held[design].items_of(stage) == num_items


def test_the_items_that_are_sent_again_grow_with_the_square_of_the_turns() -> None:
    assert NUM_RESENT_ITEMS == NUM_TURNS**2 == 121


@pytest.mark.parametrize(
    ("design", "number"),
    [
        (Design.APPEND, 1),
        (Design.INJECT, 1),
        (Design.CHAINED, 1),  # a connection knows its names
        (Design.CACHED, 1),  # as does what is kept of a key
        (Design.STATELESS, NUM_TURNS),
    ],
)
def test_the_model_is_resolved_where_it_is_not_known_yet(
    design: Design, number: int, held: Mapping[Design, HeldRun]
) -> None:
    assert held[design].runs_of(Stage.RESOLVE) == held[design].items_of(Stage.RESOLVE) == number


@pytest.mark.parametrize(
    ("design", "members", "number"),
    [
        (Design.APPEND, {}, 1),
        (Design.INJECT, {}, 1),
        (Design.CHAINED, {}, 1),  # what follows a response is of its model
        (Design.CACHED, {"prompt_cache_key": "a conversation"}, 1),
        (Design.CACHED, {}, 4),  # nothing says that it is one conversation
        (Design.STATELESS, {}, 4),
    ],
)
async def test_a_split_is_decided_once_where_a_run_is_known_to_be_one(
    design: Design, members: Event, number: int, tmp_path: Path
) -> None:
    (tmp_path / "models.toml").write_text(MODELS)
    settings = Settings(models_file=tmp_path / "models.toml")

    async with serving(*[OSLO] * 3, "Sun.", settings=settings) as server:
        responses = await hold(server, design, **members)
        counts = await server.metrics()

    stage = Stage.RESOLVE.value
    assert counts[f"suspend_stage_runs_total{{{stage}}}"] == number
    assert counts[f"suspend_stage_items_total{{{stage}}}"] == number
    if number == 1:
        assert len({response["model"] for response in responses}) == 1


@pytest.mark.parametrize(
    ("design", "num_renders", "num_encodes"),
    [
        # The tools and the question; later each output, as the suffix that it makes.
        (Design.APPEND, 1, 2 + NUM_CALLS),
        (Design.INJECT, 1, 2 + NUM_CALLS),
        # The prompt of the response before is gone on from, found by its id or by its content.
        (Design.CHAINED, 1, 2 + NUM_CALLS),
        (Design.CACHED, 1, 2 + NUM_CALLS),
        # The tools and the question, and each turn and each output so far, in each request.
        (Design.STATELESS, NUM_TURNS, sum(2 + 2 * turn for turn in range(NUM_TURNS))),
    ],
)
def test_text_is_laid_out_and_encoded_where_its_tokens_are_not_known(
    design: Design, num_renders: int, num_encodes: int, held: Mapping[Design, HeldRun]
) -> None:
    run = held[design]

    assert run.counts["suspend_template_renders_total"] == num_renders
    assert run.counts["suspend_encodes_total"] == num_encodes
    assert run.items_of(Stage.RENDER) == num_renders
    assert run.items_of(Stage.ENCODE) == num_encodes


@pytest.mark.parametrize("design", [Design.APPEND, Design.INJECT, Design.CHAINED])
def test_the_classifier_reads_everything_once_and_in_order(
    design: Design, held: Mapping[Design, HeldRun]
) -> None:
    outputs = [(Direction.TOOL_OUTPUT, ANSWER)] * NUM_CALLS
    asked = [(Direction.INPUT, QUESTION["content"]), *outputs]
    said = [(Direction.OUTPUT, text) for text in SAID]

    pairs = zip(asked, said, strict=True)
    assert held[design].classified == [text for pair in pairs for text in pair]


@pytest.mark.parametrize("design", [Design.CACHED, Design.STATELESS])
def test_the_classifier_reads_a_history_as_often_as_it_is_sent(
    design: Design, held: Mapping[Design, HeldRun]
) -> None:
    classified = held[design].classified

    assert classified.count((Direction.INPUT, QUESTION["content"])) == NUM_TURNS
    num_repeated = sum(range(NUM_TURNS))
    assert classified.count((Direction.CONTEXT, ARGUMENTS)) == num_repeated
    assert classified.count((Direction.TOOL_OUTPUT, ANSWER)) == num_repeated


# --- Inference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("design", [d for d in Design if d is not Design.STATELESS])
def test_each_position_is_forwarded_once(design: Design, held: Mapping[Design, HeldRun]) -> None:
    run = held[design]
    turn = run.responses[-1]["suspend:run"]["turns"][-1]

    # The token that was sampled last is never an input.
    length = turn["input_tokens"] + turn["output_tokens"] - 1
    assert run.counts["suspend_tokens_forwarded_total"] == length
    assert run.counts["suspend_tokens_reforwarded_total"] == 0


def test_without_a_cache_each_prompt_is_forwarded_whole(held: Mapping[Design, HeldRun]) -> None:
    run = held[Design.STATELESS]

    lengths = [tokens_in(response) - 1 for response in run.responses]
    assert run.counts["suspend_tokens_forwarded_total"] == sum(lengths)


def test_all_designs_sample_the_same_number_of_tokens(held: Mapping[Design, HeldRun]) -> None:
    assert len({run.counts["suspend_tokens_sampled_total"] for run in held.values()}) == 1
    assert len({run.counts["suspend_forward_passes_total"] for run in held.values()}) == 1


# --- After inference -----------------------------------------------------------------------------


@every_design
def test_what_the_model_says_is_classified_item_by_item(
    design: Design, held: Mapping[Design, HeldRun]
) -> None:
    run = held[design]

    assert run.items_of(Stage.CLASSIFY_OUTPUT) == len(SAID)
    assert [text for way, text in run.classified if way is Direction.OUTPUT] == SAID


@every_design
@pytest.mark.parametrize("stage", [Stage.LEDGER, Stage.METRICS])
def test_a_response_is_accounted_for_once_and_each_of_its_segments(
    stage: Stage, design: Design, held: Mapping[Design, HeldRun]
) -> None:
    run = held[design]

    assert run.runs_of(stage) == (1 if design in SUSPENDED else NUM_TURNS)
    assert run.items_of(stage) == NUM_TURNS


@every_design
def test_a_response_is_stored_once(design: Design, held: Mapping[Design, HeldRun]) -> None:
    assert held[design].runs_of(Stage.STORE) == (1 if design in SUSPENDED else NUM_TURNS)


@every_design
def test_a_run_is_a_row_of_the_ledger_or_one_for_each_turn(
    design: Design, held: Mapping[Design, HeldRun]
) -> None:
    [total] = held[design].totals

    assert total.num_runs == (1 if design in SUSPENDED else NUM_TURNS)
    assert total.num_segments == NUM_TURNS


def test_the_ledger_has_the_same_usage_whatever_the_design(held: Mapping[Design, HeldRun]) -> None:
    totals = [run.totals[0] for run in held.values()]

    assert len({total.output_tokens for total in totals}) == 1
    assert len({total.input_tokens for total in totals}) == 1
    cached = {design: run.totals[0].cached_tokens for design, run in held.items()}
    assert cached.pop(Design.STATELESS) == 0
    assert len(set(cached.values())) == 1


# --- What a client is told -----------------------------------------------------------------------


@every_design
def test_responses_tell_of_all_that_was_done_before_their_end(
    design: Design, held: Mapping[Design, HeldRun]
) -> None:
    run = held[design]
    last = run.responses[-1:] if design in SUSPENDED else run.responses

    for stage in set(Stage) - {Stage.STORE}:  # which comes when the end is told
        told = [response["suspend:run"]["stages"].get(stage.value, {}) for response in last]
        assert sum(tally.get("runs", 0) for tally in told) == run.runs_of(stage)
        assert sum(tally.get("items", 0) for tally in told) == run.items_of(stage)


def test_a_suspended_response_tells_of_what_was_done_so_far(
    held: Mapping[Design, HeldRun],
) -> None:
    responses = held[Design.APPEND].responses

    stages = [response["suspend:run"]["stages"] for response in responses]
    numbers = list(range(1, NUM_TURNS + 1))
    assert [told[Stage.PARSE]["items"] for told in stages] == numbers
    assert [told[Stage.CLASSIFY_OUTPUT]["items"] for told in stages] == numbers
    assert [told[Stage.LEDGER]["items"] for told in stages] == numbers
    assert [told[Stage.LEDGER]["runs"] for told in stages] == [0] * NUM_CALLS + [1]


async def test_outputs_that_come_frame_by_frame_are_each_counted_once() -> None:
    async with suspended(BOTH, "Sun.") as (server, client, first):
        [_, second] = calls_in(client.streams[0])
        await client.send("response.append", input=[output(first)])
        events = await client.append(output(second))
        metrics = await server.metrics()

    told = events[-1]["response"]["suspend:run"]["stages"]
    assert (told[Stage.PARSE]["runs"], told[Stage.PARSE]["items"]) == (3, 3)
    # The first is laid out with something in the place of the second, to see whether it fits.
    assert (told[Stage.RENDER]["runs"], told[Stage.ENCODE]["items"]) == (1, 2 + 2)
    for stage in (Stage.PARSE, Stage.RENDER, Stage.ENCODE):
        assert told[stage]["items"] == metrics[f"suspend_stage_items_total{{{stage.value}}}"]


# --- Who asks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("design", "number"),
    [
        (Design.APPEND, 1),
        (Design.INJECT, 1),
        (Design.CHAINED, 1),
        (Design.CACHED, 2),
        (Design.STATELESS, 2),
    ],
)
async def test_a_connection_is_authenticated_once_and_otherwise_each_request(
    design: Design, number: int, tmp_path: Path
) -> None:
    key = add_api_key(tmp_path / "keys", "ada")
    headers = [("Authorization", f"Bearer {key}")]
    settings = Settings(api_key_file=tmp_path / "keys")

    async with serving(OSLO, "Sun.", settings=settings) as server, server.http() as http:
        responses = await hold(server, design, headers=headers)
        exposition = (await http.get("/metrics", headers=headers)).text

    # To ask for the metrics is no part of the work.
    sample = f'suspend_stage_runs_total{{stage="authenticate"}} {number:.1f}'
    assert sample in exposition.splitlines()
    # Each response tells of it that it was done for, and none twice.
    told = [response["suspend:run"]["stages"].get("authenticate") for response in responses]
    if design in SUSPENDED:
        told = told[-1:]  # each segment tells of all so far
    assert [tally["runs"] for tally in told if tally] == [1] * number
    assert told[0] is not None
    assert told[0]["seconds"] > 0


async def test_a_warm_up_leaves_it_to_another_to_tell_of_the_handshake(tmp_path: Path) -> None:
    key = add_api_key(tmp_path / "keys", "ada")
    settings = Settings(api_key_file=tmp_path / "keys", recent_responses=0)
    headers = [("Authorization", f"Bearer {key}")]

    async with (
        serving("Sun.", settings=settings) as server,
        server.connect("append", headers=headers) as client,
    ):
        await client.create(generate=False)
        stages = [(await client.create())[-1]["response"]["suspend:run"]["stages"] for _ in "12"]

    assert [told.get("authenticate", {}).get("runs") for told in stages] == [1, None]
