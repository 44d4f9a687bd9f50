"""What samples in vLLM's process follows from the ids of the context alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from protocol.client_events import TextFormat
from sampler.engines.vllm.processor import PLAN, SegmentPlan, SegmentProcessor, failure_id_of
from sampler.params import Constraint, SamplingParams
from sampler.tokenizer import Tokenizer
from tests.sampler.engines.fake_engine_core import hash_model
from tests.sampler.engines.vllm_runs import FORCED, FREE, tokenizer
from tests.sampler.engines.vllm_types import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
)
from tests.sampler.engines.vllm_types import (
    SamplingParams as VllmParams,
)
from tests.sampler.runs import VOCAB_SIZE
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, byte_tokenizer

MODEL = hash_model(VOCAB_SIZE)
PENALISED = SamplingParams(temperature=0.9, seed=4, frequency_penalty=2.0, presence_penalty=1.0)
PROMPT = [50, 51, 52]
NUM_TOKENS = 12


class Batch:
    """Rows, as vLLM keeps them."""

    def __init__(self) -> None:
        self.processor = SegmentProcessor(tokenizer(), 64)
        self.rows: list[tuple[list[int], list[int]]] = []
        """Prompt and outputs of each."""

    def add(self, prompt: list[int], outputs: list[int], plan: SegmentPlan | None) -> None:
        """Add a row at the end."""
        self.rows.append((prompt, outputs))
        args = None if plan is None else {PLAN: plan.encode()}
        added = (len(self.rows) - 1, VllmParams(extra_args=args), prompt, outputs)
        self.update(added=[added])

    def update(
        self,
        removed: Sequence[int] = (),
        added: Sequence[AddedRequest] = (),
        moved: Sequence[tuple[int, int, MoveDirectionality]] = (),
    ) -> None:
        self.processor.update_state(BatchUpdate(len(self.rows), removed, added, moved))

    def step(self) -> None:
        """Sample a token of each row."""
        self.processor.update_state(None)
        logits = torch.stack([MODEL([*prompt, *outputs]) for prompt, outputs in self.rows])
        chosen = self.processor.apply(logits).argmax(-1).tolist()
        for (_, outputs), token_id in zip(self.rows, chosen, strict=True):
            outputs.append(token_id)


def alone(params: SamplingParams, constraint: Constraint, prompt: list[int]) -> list[int]:
    """Return what a row says that nobody disturbs."""
    batch = Batch()
    batch.add(list(prompt), [], SegmentPlan(params, constraint, len(prompt)))
    for _ in range(NUM_TOKENS):
        batch.step()
    return batch.rows[0][1]


@pytest.mark.parametrize("constraint", [Constraint(), FORCED])
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_request_that_is_added_again_goes_on_as_if_it_had_not_been(
    constraint: Constraint, cut: int
) -> None:
    whole = alone(PENALISED, constraint, PROMPT)
    plan = SegmentPlan(PENALISED, constraint, len(PROMPT))

    preempted, reopened = Batch(), Batch()
    preempted.add(PROMPT, whole[:cut], plan)  # with what it had sampled
    reopened.add(PROMPT + whole[:cut], [], plan)  # with all that as its prompt

    for batch in (preempted, reopened):
        for _ in range(NUM_TOKENS - cut):
            batch.step()
    assert preempted.rows[0][1] == whole
    assert reopened.rows[0][1] == whole[cut:]


def test_rows_that_move_keep_their_plans() -> None:
    prompts = [[50, first] for first in (60, 61, 62)]
    expected = [alone(PENALISED, FORCED, prompt) for prompt in prompts]
    batch = Batch()
    for prompt in prompts:
        batch.add(prompt, [], SegmentPlan(PENALISED, FORCED, len(prompt)))
    batch.step()

    rows = batch.rows
    rows[0], rows[2] = rows[2], rows[0]
    batch.update(moved=[(0, 2, MoveDirectionality.SWAP)])
    batch.step()
    rows[0] = rows.pop()
    batch.update(removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    for _ in range(NUM_TOKENS - 2):
        batch.step()

    assert [outputs for _, outputs in batch.rows] == expected[:2]


def test_a_row_without_a_plan_is_left_alone() -> None:
    batch = Batch()
    batch.add(PROMPT, [], SegmentPlan(PENALISED, FORCED, len(PROMPT)))
    batch.rows.clear()
    batch.add(PROMPT, [], None)
    logits = MODEL(PROMPT)[None]

    assert torch.equal(batch.processor.apply(logits.clone()), logits)


def test_a_row_that_fails_says_so_for_good_and_others_go_on() -> None:
    batch = Batch()
    batch.add(PROMPT, [], SegmentPlan(PENALISED, Constraint(forced_ids=(70,)), len(PROMPT)))
    batch.add(PROMPT, [], SegmentPlan(PENALISED, FORCED, len(PROMPT)))
    batch.processor.update_state(
        BatchUpdate(3, [], [(2, VllmParams(extra_args={PLAN: b"{"}), PROMPT, [])], [])
    )
    batch.rows.append((PROMPT, []))

    for _ in range(NUM_TOKENS):
        batch.step()

    said = [outputs for _, outputs in batch.rows]
    failure = failure_id_of(tokenizer())
    assert said[0] == [70] + [failure] * (NUM_TOKENS - 1)
    assert said[1] == alone(PENALISED, FORCED, PROMPT)
    assert said[2] == [failure] * NUM_TOKENS


def test_what_says_failure_is_said_for_nothing_else() -> None:
    batch = Batch()
    batch.add(PROMPT, [], SegmentPlan(SamplingParams(temperature=0), FREE, len(PROMPT)))
    batch.add(PROMPT, [], SegmentPlan(PENALISED, Constraint(), len(PROMPT)))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, failure_id_of(tokenizer())] = 100.0
    logits[:, 77] = 50.0

    assert batch.processor.apply(logits).argmax(-1).tolist() == [77, 77]


def test_failure_is_said_with_a_control_token_that_ends_no_turn() -> None:
    assert failure_id_of(Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END])) == IM_START
    silent = [END_OF_TEXT, IM_START, IM_END]
    assert failure_id_of(Tokenizer(byte_tokenizer(), silent)) == 258  # the last one there is


@pytest.mark.parametrize(
    "constraint",
    [
        FORCED,
        Constraint(thinks=True, think_is_open=True),
        Constraint(text_format=TextFormat()),
        Constraint(forced_ids=(1, 2)),
    ],
)
def test_a_plan_travels_as_bytes(constraint: Constraint) -> None:
    plan = SegmentPlan(PENALISED, constraint, 17)

    assert SegmentPlan.decode(plan.encode()) == plan


def test_it_may_change_which_token_is_the_likeliest() -> None:
    processor: Any = SegmentProcessor(tokenizer(), 64)
    assert not processor.is_argmax_invariant()
