"""What tests of the engine share: a tiny model whose calls are one token long, and its clients.

A whole tool call is a token of its own here. So a turn takes two or three steps, and no sampled
call is what encoding its text would give. (Where a grammar leaves no choice but to call, it wants
the call spelled out, as encoding would.)
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from weakref import WeakKeyDictionary

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.items import FunctionCall, Message
from protocol.tools import CallableTool
from sampler.chat_template import ChatMLFormat
from sampler.conversation import Conversation
from sampler.engine import Resumption, ToolCaller
from sampler.kv_cache import GenericCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import GenericRunner
from sampler.outputs import ArgumentsDelta, CallDone, Output, SegmentEnded, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.prompt import TokenPrompt
from sampler.recorded_turn import Call, RecordedTurn
from sampler.run import Run
from sampler.snapshot import Snapshot, Sources
from sampler.suspension import Suspension
from sampler.tokenizer import Tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, WEATHER, call_text

OSLO_CALL = call_text("get_weather", '{"city": "Oslo"}')
ROME_CALL = call_text("get_weather", '{"city": "Rome"}')
CALL_OSLO, CALL_ROME, AND_CALL_ROME, MERGED_AB = 259, 260, 261, 262
VOCAB_SIZE = 263
DEADLINE_SECONDS = 10.0

Steering = Callable[[int], Sequence[int]]
"""The tokens among which the model's weights choose at a position; none of them leaves them all."""


class Gate:
    """Work on a thread that begins, waits to be let go, and says that it is over."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._may_go_on = threading.Event()
        self.is_over = False

    def pass_through(self, result: object = None) -> object:
        """Wait to be let go, then return ``result``, or raise it."""
        self._begun.set()
        assert self._may_go_on.wait(DEADLINE_SECONDS)
        self.is_over = True
        if isinstance(result, Exception):
            raise result
        return result

    async def wait_until_begun(self) -> None:
        """Wait until the thread is at the gate."""
        assert await asyncio.to_thread(self._begun.wait, DEADLINE_SECONDS)

    def open(self) -> None:
        """Let the thread go on."""
        self._may_go_on.set()


async def let_the_loop_turn() -> None:
    """Let all tasks go on that can without waiting for a thread."""
    for _ in range(20):
        await asyncio.sleep(0)


class SteeredRunner(GenericRunner):
    """A runner that says what it is told to, by position in the log or by turn.

    It notes every forward pass. Steering by position lets a prompt be prefilled in chunks.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__(model)
        self.layers = model.model.layers
        self.passes: list[tuple[int, list[int]]] = []
        """The number of the cache, and the token ids, of every forward pass, in order."""
        self.turns: list[list[int]] = []
        """What every run says, turn by turn; each turn ends in ``<|im_end|>`` of itself."""
        self.steering: Steering = lambda position: ()
        """What is said where there are no ``turns``."""
        self.before_pass: Callable[[GenericCache, Sequence[int]], object] = lambda *_: None
        """Called on the model thread before each pass; may block or raise."""
        self._num_caches = 0
        self._numbers: WeakKeyDictionary[GenericCache, int] = WeakKeyDictionary()
        self._said: WeakKeyDictionary[GenericCache, int] = WeakKeyDictionary()

    @property
    def inputs(self) -> list[list[int]]:
        """The token ids of every forward pass, in order."""
        return [token_ids for _, token_ids in self.passes]

    def extend(self, token_ids: Sequence[int], cache: GenericCache) -> Tensor:
        self.before_pass(cache, token_ids)
        self.passes.append((self._number(cache), list(token_ids)))
        logits = super().extend(token_ids, cache)
        choice = self._next_of_turn(cache) if self.turns else self.steering(cache.num_tokens)
        if not choice:
            return logits
        steered = torch.full_like(logits, -1e9)
        steered[list(choice)] = logits[list(choice)]
        return steered

    def _number(self, cache: GenericCache) -> int:
        self._num_caches += cache not in self._numbers
        return self._numbers.setdefault(cache, self._num_caches)

    def _next_of_turn(self, cache: GenericCache) -> Sequence[int]:
        said = [token_id for turn in self.turns for token_id in [*turn, IM_END]]
        index = self._said.get(cache, 0)
        self._said[cache] = index + 1
        return said[index : index + 1]


def steered_model(max_context: int = 4096) -> LoadedModel:
    """Return a two-layer Llama over bytes, whole calls, and the pair ``ab``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
    )
    runner = SteeredRunner(LlamaForCausalLM(config))
    tokenizer = Tokenizer(_fast_tokenizer(), [END_OF_TEXT, IM_END], counters=runner.counters)
    return LoadedModel("steered", runner, tokenizer, ChatMLFormat(tokenizer))


def _fast_tokenizer() -> FastTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # No merge leads to a call, so encoding its text gives bytes.
    texts = [OSLO_CALL, ROME_CALL, f"\n{ROME_CALL}"]
    calls = [byte_level.pre_tokenize_str(text)[0][0] for text in texts]
    tokens = [*specials, *alphabet, *calls, "ab"]
    fast = FastTokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("a", "b")]))
    fast.pre_tokenizer = byte_level
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return fast


@contextmanager
def steered_engine(
    *turns: Sequence[int | str],
    max_context: int = 4096,
    prefill_chunk: int | None = None,
    gathering_seconds: float = 0.002,
) -> Iterator[LocalEngine]:
    """Give an engine whose every run says ``turns``: texts byte by byte, and token ids."""
    model = steered_model(max_context)
    runner_of(model).turns = [_token_ids(model.tokenizer, turn) for turn in turns]
    engine = LocalEngine(
        model,
        prefill_chunk=prefill_chunk or max_context,
        gathering_seconds=gathering_seconds,
        window=8,  # so that turns of some length use it up
    )
    with closing(engine):
        yield engine


def _token_ids(tokenizer: Tokenizer, parts: Sequence[int | str]) -> list[int]:
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += [token_id for character in part for token_id in tokenizer.encode_text(character)]
        else:
            ids.append(part)
    return ids


def runner_of(model: LoadedModel) -> SteeredRunner:
    """Return the runner of a steered model."""
    assert isinstance(model.runner, SteeredRunner)
    return model.runner


async def open_run(
    engine: LocalEngine,
    text: str = "Hello",
    *,
    tools: Sequence[CallableTool] = (WEATHER,),
    params: SamplingParams | None = None,
    constraint: Constraint | None = None,
    snapshots: Sequence[Snapshot] = (),
) -> Run:
    """Return a queued run on a prompt of one message; greedy and ``auto`` unless told otherwise."""
    prompt = await engine.encode(Conversation([Message("user", text)], tools=tools))
    return engine.open_run(
        f"run {text[:10]}",
        prompt.token_ids,
        params or SamplingParams(temperature=0),
        constraint or Constraint(tuple(tools)),
        Sources(snapshots),
    )


async def sample(
    engine: LocalEngine, run: Run, call_tools: ToolCaller | None = None
) -> list[Output]:
    """Sample ``run`` to its end and return all that came out."""
    async with aclosing(engine.sample(run, call_tools)) as outputs:
        return [output async for output in outputs]


class Client:
    """Answers the calls of one run, at once."""

    def __init__(
        self, engine: LocalEngine, run: Run, output: str = "sunny", messages: Sequence[Message] = ()
    ) -> None:
        self.suspensions: list[Suspension] = []
        """What the client was asked, in order."""
        self.suffixes: list[list[int]] = []
        """What it appended."""
        self._engine = engine
        self._run = run
        self._output = output
        self._messages = messages

    def __call__(self, suspension: Suspension) -> "asyncio.Future[Resumption | None]":
        self.suspensions.append(suspension)
        return asyncio.ensure_future(self._answer(suspension))

    async def _answer(self, suspension: Suspension) -> Resumption:
        answered = suspension.answer(self._outputs(suspension), self._messages)
        resumption = await resume_with(self._engine, self._run, answered)
        assert isinstance(resumption.prompt, TokenPrompt)
        self.suffixes.append(list(resumption.prompt.token_ids[len(self._run.tokens) :]))
        return resumption

    def _outputs(self, suspension: Suspension) -> Mapping[str, str]:
        return dict.fromkeys(suspension.awaited, self._output)


async def resume_with(
    engine: LocalEngine, run: Run, answered: Suspension, constraint: Constraint | None = None
) -> Resumption:
    """Return what makes ``run`` go on with the outputs that ``answered`` holds."""
    turn = RecordedTurn(answered.calls, tuple(run.sampled_in_segment()))
    known = TokenPrompt(Conversation([turn]), run.tokens.ids)
    prompt = await engine.encode(Conversation([turn, *answered.items()]), known)
    return Resumption(prompt, time.monotonic(), constraint or run.constraint)


async def until_suspended(outputs: AsyncGenerator[Output, None]) -> Suspension:
    """Sample up to the next suspension and return it."""
    async for output in outputs:
        if isinstance(output, SegmentEnded) and output.suspension is not None:
            return output.suspension
    raise AssertionError("the run ended without a suspension")


def text_of(outputs: Sequence[Output]) -> str:
    """Return all text for the reader."""
    return "".join(output.text for output in outputs if isinstance(output, TextDelta))


def arguments_of(outputs: Sequence[Output]) -> str:
    """Return all pieces of arguments, joined."""
    return "".join(output.text for output in outputs if isinstance(output, ArgumentsDelta))


def flat(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Return the token ids of several passes in a row."""
    return [token_id for token_ids in inputs for token_id in token_ids]


def steer(engine: LocalEngine, start: int, choices: Sequence[Sequence[int]]) -> None:
    """Have what is sampled from position ``start`` on chosen from ``choices``, one by one."""
    runner_of(engine.model).steering = lambda position: (
        choices[position - start] if 0 <= position - start < len(choices) else ()
    )


def arguments_in(call: Call) -> str:
    """Return the arguments of a function call."""
    assert isinstance(call, FunctionCall)
    return call.arguments


def names_called(outputs: Sequence[Output]) -> list[str]:
    """Return the names of the tools called, in order."""
    return [output.call.name for output in outputs if isinstance(output, CallDone)]


def ending(outputs: Sequence[Output]) -> SegmentEnded:
    """Return the last output, which says how the last segment ended."""
    assert isinstance(outputs[-1], SegmentEnded)
    return outputs[-1]
