"""A run over an endpoint for completions keeps the very tokens that were sampled.

The endpoint's model is a hash: each token follows from all the ids that were sent, and from the
seed. So whatever is wrong with a history shows in what is said next.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pytest

from protocol.client_events import TextFormat, TextFormatKind
from protocol.items import FunctionCall, Message
from protocol.tools import CustomFormat, CustomTool, FunctionTool
from protocol.validation import JsonObject
from sampler.chat_template import ChatMLFormat
from sampler.conversation import Conversation
from sampler.engine import Resumption
from sampler.engine_error import EngineError
from sampler.engines.completions.backend import WINDOW, CompletionsBackend, completions_engine
from sampler.engines.completions.dialect import DIALECTS
from sampler.engines.endpoint.client import Endpoint, EndpointSettings
from sampler.engines.endpoint.errors import EndpointError
from sampler.grammar import GrammarError
from sampler.language import LoadedLanguage
from sampler.outputs import CallDone, Output, SegmentEnded, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.prompt import TokenPrompt
from sampler.recorded_turn import RecordedTurn
from sampler.run import Origin, Run, RunState, Segment, StopReason
from sampler.sampling import Sampled, TokenLogprobs
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.token_backend import Session
from sampler.token_engine import TokenEngine
from sampler.tokenizer import Tokenizer
from tests.sampler.engines.fake_endpoint import (
    API_KEY,
    DEADLINE_SECONDS,
    MODEL,
    Chunk,
    Delta,
    FakeEndpoint,
    Script,
    Step,
    breaks,
    ends,
    fake_endpoint,
    refuses,
    silence,
)
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, WEATHER, call_text, word_tokenizer

AB = 259
VOCAB_SIZE = 260
CALL = call_text("get_weather", '{"city": "Oslo"}')
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1.0, seed=7)
LONG = "How is the weather? " * 30  # a token a byte, and some blocks of the endpoint's cache

pytestmark = pytest.mark.filterwarnings("error")


def tiny_language() -> LoadedLanguage:
    """Return a language of bytes, and of ``ab``, which is a token too."""
    tokenizer = Tokenizer(word_tokenizer(["ab"]), [END_OF_TEXT, IM_END])
    return LoadedLanguage("tiny", tokenizer, ChatMLFormat(tokenizer), max_context=4096)


TOKENIZER = tiny_language().tokenizer
"""For tests to spell with; engines have their own, which count."""


def spelled(text: str) -> list[int]:
    """Return ``text`` as no tokenizer would have it: ``a`` and ``b`` apart."""
    return [token_id for letter in text for token_id in TOKENIZER.encode_text(letter)]


# --- The model at the endpoint -------------------------------------------------------------------


class HashedModel:
    """Says a few letters, which follow from all that it has read; calls first, as often as told."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._header = [IM_START, *spelled("assistant\n")]

    def turn(self, token_ids: Sequence[int], seed: int | None) -> list[int]:
        """Return what is said after ``token_ids``, greedily if there is no seed."""
        said: list[int] = []
        while len(said) < 12:
            said.append((*spelled("abab"), AB)[self._drawn([*token_ids, *said], seed) % 5])
        length = len(self._header)
        starts = range(len(token_ids) - length + 1)
        num_turns = sum(list(token_ids[i : i + length]) == self._header for i in starts)
        return [*said, *(spelled(CALL) if num_turns <= self._num_calls else ()), IM_END]

    def _drawn(self, token_ids: Sequence[int], seed: int | None) -> int:
        digest = blake2b(repr((token_ids, seed)).encode(), digest_size=4).digest()
        return int.from_bytes(digest)

    def answer(self, body: JsonObject) -> list[int]:
        """Return what is said to a request, as far as it asks for it."""
        seed = body["seed"] if body["temperature"] else None
        return self.turn(body["prompt"], seed)[: body["max_tokens"]]


def pieces(token_ids: Sequence[int]) -> list[list[int]]:
    """Return ``token_ids`` in pieces of one, two and three, and again."""
    cut, size = [], 0
    rest = list(token_ids)
    while rest:
        size = size % 3 + 1
        cut.append(rest[:size])
        rest = rest[size:]
    return cut


def text_of_ids(token_ids: Iterable[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, token_ids)).decode("utf-8", "replace")


def says_ids(*token_ids: int) -> list[Step]:
    """Say tokens as Cerebras does, a few at a time."""
    return [
        Delta({"content": text_of_ids(piece), "tokens": piece}, len(piece))
        for piece in pieces(token_ids)
    ]


def as_cerebras(token_ids: Sequence[int], body: JsonObject) -> Script:
    """Say all of a turn."""
    is_whole = token_ids[-1] == IM_END
    return [*says_ids(*token_ids), *ends("stop" if is_whole else "length")]


def without_stop_token(token_ids: Sequence[int], body: JsonObject) -> Script:
    """Say a turn, but not what ends it."""
    assert token_ids[-1] == IM_END
    return [*says_ids(*token_ids[:-1]), *ends("stop")]


def as_vllm(token_ids: Sequence[int], body: JsonObject) -> Script:
    """Say all of a turn as vLLM does: the counts come behind it."""
    finish_reason = "stop" if token_ids[-1] in body["stop_token_ids"] else "length"
    *most, last = [
        {"index": 0, "text": text_of_ids(piece), "token_ids": piece, "finish_reason": None}
        for piece in pieces(token_ids)
    ]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(token_ids)}
    return [
        *(Chunk({"choices": [choice]}) for choice in most),
        Chunk({"choices": [last | {"finish_reason": finish_reason}]}),
        Chunk({"choices": [], "usage": usage}),
        *ends(None),
    ]


SPEECH = {"cerebras": as_cerebras, "vllm": as_vllm}


# --- Runs -----------------------------------------------------------------------------------------


@asynccontextmanager
async def completing(
    *scripts: Script,
    model: HashedModel | None = None,
    dialect: str = "cerebras",
    speech: Callable[[Sequence[int], JsonObject], Script] | None = None,
    at_endpoint: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[FakeEndpoint, TokenEngine]]:
    """Serve an endpoint that says ``scripts``, and then what ``model`` says, and open an engine."""
    async with fake_endpoint(*scripts) as fake:
        if model is not None:
            say = speech or SPEECH[dialect]
            fake.answer = lambda body: say(model.answer(body), body)
        chosen: dict[str, Any] = {"patience_seconds": 0.0, "backoff_seconds": 0.01}
        endpoint = Endpoint(
            EndpointSettings(fake.url, API_KEY, **(chosen | dict(at_endpoint or {})))
        )
        engine = completions_engine(MODEL, endpoint, tiny_language(), dialect=dialect, **settings)
        try:
            await engine.start()
            yield fake, engine
        finally:
            await engine.stop()
            engine.close()
        assert endpoint.gate.in_flight == 0
        assert engine.runs == ()


async def open_run(
    engine: TokenEngine,
    text: str = "Hi",
    params: SamplingParams = GREEDY,
    constraint: Constraint = Constraint((WEATHER,)),  # noqa: B008 - frozen
) -> Run:
    prompt = await engine.encode(Conversation([Message("user", text)], tools=constraint.tools))
    return engine.open_run(f"run {text[:5]}", prompt, params, constraint)


async def sample(engine: TokenEngine, run: Run) -> list[Output]:
    """Sample ``run`` to its end, with each call answered at once."""

    async def call_tools(suspension: Suspension) -> Resumption:
        answered = suspension.answer(dict.fromkeys(suspension.awaited, "sunny"))
        turn = RecordedTurn(answered.calls, tuple(run.sampled_in_segment()))
        known = TokenPrompt(Conversation([turn]), run.tokens.ids)
        prompt = await engine.encode(Conversation([turn, *answered.items()]), known)
        return Resumption(prompt, time.monotonic(), run.constraint)

    async with asyncio.timeout(DEADLINE_SECONDS), aclosing(engine.sample(run, call_tools)) as given:
        return [output async for output in given]


async def sample_once(engine: TokenEngine, run: Run) -> SegmentEnded:
    """Sample one segment of ``run``, and leave it there."""
    async with asyncio.timeout(DEADLINE_SECONDS), aclosing(engine.sample(run)) as given:
        outputs = [output async for output in given]
    assert isinstance(outputs[-1], SegmentEnded)
    return outputs[-1]


@asynccontextmanager
async def session_at(
    script: Script, dialect: str = "cerebras", params: SamplingParams = GREEDY
) -> AsyncIterator[Session]:
    """Begin a segment that an endpoint says ``script`` to, and leave it to be read."""
    async with fake_endpoint(script) as fake:
        language = replace(tiny_language(), name=MODEL)
        endpoint = Endpoint(EndpointSettings(fake.url, API_KEY))
        backend = CompletionsBackend(endpoint, language, DIALECTS[dialect], 4096, 4096)
        run = Run("run", params, Constraint())
        run.tokens.append(spelled("Hi"), Origin.PROMPT)
        run.segments.append(Segment(2, 0, requested_at=0.0))
        session = backend.new_session(run, Sources())
        session.expect()
        session.start(None)
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield session
        await session.stop(len(run.tokens))
        await backend.stop()


def text_of(outputs: Iterable[Output]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TextDelta))


def sampled_spans(run: Run) -> list[tuple[int, ...]]:
    ids, spans = run.tokens.ids, run.tokens.spans
    return [ids[s.start : s.stop] for s in spans if s.origin is Origin.SAMPLED]


# --- A suspended run has the tokens of an uninterrupted one ---------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_run_suspended_twice_says_what_the_model_says_to_the_whole_history(
    dialect: str,
) -> None:
    model = HashedModel(num_calls=2)
    async with completing(model=model, dialect=dialect) as (fake, engine):
        run = await open_run(engine)

        outputs = await sample(engine, run)

        assert run.state is RunState.COMPLETED
        history: list[int] = []
        for span in run.tokens.spans:
            ids = list(run.tokens.ids[span.start : span.stop])
            if span.origin is Origin.SAMPLED:
                assert ids == model.turn(history, None)
            history += ids
        assert sum(isinstance(output, CallDone) for output in outputs) == 2
        assert len(fake.requests) == len(run.segments) == 3


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_run_suspended_twice_has_the_tokens_of_one_request_for_each_turn(
    dialect: str,
) -> None:
    async with completing(model=HashedModel(num_calls=2), dialect=dialect) as (fake, engine):
        suspended = await open_run(engine, params=SEEDED)
        await sample(engine, suspended)
        ids = suspended.tokens.ids
        prompts = [ids[: segment.input_tokens] for segment in suspended.segments]

        ended = []
        for prompt in prompts:
            run = engine.open_run("stateless", prompt, SEEDED, Constraint((WEATHER,)))
            ended.append(await sample_once(engine, run))

        assert [end.token_ids for end in ended] == sampled_spans(suspended)
        bodies = [request.body for request in fake.requests]
        assert bodies[:3] == bodies[3:]


async def test_another_seed_and_another_place_draw_something_else() -> None:
    async with completing(model=HashedModel(num_calls=1)) as (fake, engine):
        for seed in (7, 8):
            await sample(engine, await open_run(engine, params=replace(SEEDED, seed=seed)))

        seeds = [request.body["seed"] for request in fake.requests]
        assert len(set(seeds)) == len(seeds) == 4
        assert all(0 <= seed < 2**31 for seed in seeds)


async def test_each_request_has_the_ids_of_the_log_and_no_text() -> None:
    async with completing(model=HashedModel(num_calls=2)) as (fake, engine):
        run = await open_run(engine)

        await sample(engine, run)

        prompts = [request.body["prompt"] for request in fake.requests]
        assert prompts == [list(run.tokens.ids[: s.input_tokens]) for s in run.segments]
        for shorter, longer in pairwise(prompts):
            assert longer[: len(shorter)] == shorter


async def test_ids_that_no_tokenizer_would_choose_stay_as_they_are() -> None:
    odd = spelled("ab ab")
    async with completing(
        [*says_ids(*odd, *spelled(CALL), IM_END), *ends("stop")], model=HashedModel(0)
    ) as (fake, engine):
        assert odd != TOKENIZER.encode_text("ab ab")
        run = await open_run(engine)

        outputs = await sample(engine, run)

        said = (*odd, *spelled(CALL), IM_END)
        assert sampled_spans(run)[0] == said
        assert text_of(outputs).startswith("ab ab")
        start = run.segments[0].input_tokens
        assert fake.requests[1].body["prompt"][start : start + len(said)] == list(said)


async def test_a_turn_whose_end_is_left_out_ends_as_the_chat_format_says() -> None:
    model = HashedModel(num_calls=1)
    async with completing(model=model, speech=without_stop_token) as (fake, engine):
        run = await open_run(engine)

        await sample(engine, run)

        assert all(span[-1] == IM_END and span.count(IM_END) == 1 for span in sampled_spans(run))
        assert sampled_spans(run)[1] == tuple(model.turn(fake.requests[1].body["prompt"], None))
        assert run.segments[0].output_tokens == len(sampled_spans(run)[0])


# --- What is asked for ----------------------------------------------------------------------------


async def test_a_request_says_how_to_sample_in_cerebras_words() -> None:
    async with completing(model=HashedModel(0)) as (fake, engine):
        await sample_once(engine, await open_run(engine, params=SamplingParams(0.5, 0.9)))

        body = fake.requests[0].body
        del body["prompt"], body["seed"]
        assert body == {
            "model": MODEL,
            "max_tokens": 4096 - fake.requests[0].prompt_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "top_p": 0.9,
            "return_raw_tokens": True,
        }


async def test_a_request_says_how_to_sample_in_vllms_words() -> None:
    params = SamplingParams(0.5, top_logprobs=2, presence_penalty=0.5, max_output_tokens=30)
    async with completing(model=HashedModel(0), dialect="vllm") as (fake, engine):
        await sample_once(engine, await open_run(engine, params=params))

        asked = fake.requests[0].body.items()
        assert asked >= {"return_token_ids": True, "skip_special_tokens": False}.items()
        assert asked >= {"add_special_tokens": False, "top_k": -1}.items()
        assert asked >= {"logprobs": 2, "return_tokens_as_token_ids": True}.items()
        assert asked >= {"presence_penalty": 0.5, "frequency_penalty": 0.0}.items()
        assert fake.requests[0].body["max_tokens"] == 30
        assert fake.requests[0].body["stop_token_ids"] == [END_OF_TEXT, IM_END]


async def test_where_a_request_sets_no_limit_the_engine_does() -> None:
    async with completing(model=HashedModel(0), max_tokens=5) as (fake, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert fake.requests[0].body["max_tokens"] == 5
        assert ended.reason is StopReason.MAX_OUTPUT_TOKENS
        assert fake.num_unbounded == 0


# --- How a turn ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_is_as_long_as_the_request_wants(dialect: str) -> None:
    params = replace(GREEDY, max_output_tokens=4)
    async with completing(model=HashedModel(0), dialect=dialect) as (_, engine):
        run = await open_run(engine, params=params)

        ended = await sample_once(engine, run)

        assert ended.reason is StopReason.MAX_OUTPUT_TOKENS
        assert run.segments[0].output_tokens == 4
        assert run.state is RunState.INCOMPLETE


async def test_a_turn_ends_where_the_context_does() -> None:
    async with completing(model=HashedModel(0), max_context=400) as (_, engine):
        run = await open_run(engine)
        room = 400 - len(run.tokens)
        run = await open_run(engine, "Hi" + "!" * (room - 6))

        ended = await sample_once(engine, run)

        assert ended.reason is StopReason.CONTEXT_LENGTH
        assert len(run.tokens) == 400


async def test_an_endpoint_may_have_less_of_a_context() -> None:
    async with completing([*says_ids(*spelled("ab")), *ends("length")]) as (_, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert ended.reason is StopReason.CONTEXT_LENGTH
        assert ended.token_ids == (*spelled("ab"), IM_END)


async def test_a_turn_that_is_filtered_is_cut() -> None:
    async with completing([*says_ids(*spelled("ab")), *ends("content_filter")]) as (_, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert ended.reason is StopReason.CONTENT_FILTER


async def test_an_endpoint_that_goes_on_after_the_end_of_a_turn_is_left() -> None:
    script = [*says_ids(*spelled("ab"), END_OF_TEXT), *says_ids(*spelled("more")), *silence()]
    async with completing(script) as (fake, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert ended.reason is StopReason.END_OF_TURN
        assert ended.token_ids == (*spelled("ab"), END_OF_TEXT)
        await asyncio.wait_for(fake.requests[0].over.wait(), DEADLINE_SECONDS)
        assert fake.requests[0].was_left


async def test_what_such_an_endpoint_counts_beyond_the_end_is_not_missed() -> None:
    script = [*says_ids(*spelled("ab"), END_OF_TEXT), *says_ids(*spelled("more")), *ends("length")]
    async with completing(script) as (_, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert ended.token_ids == (*spelled("ab"), END_OF_TEXT)


async def test_a_turn_without_a_word_is_one() -> None:
    async with completing([*ends("stop")]) as (_, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert ended.reason is StopReason.END_OF_TURN
        assert ended.token_ids == (IM_END,)


# --- What cannot be relied on ---------------------------------------------------------------------


def choice(**members: Any) -> list[Step]:
    return [Chunk({"choices": [{"index": 0, "text": "x"} | members]})]


def counts(**usage: int) -> list[Step]:
    """End well, but for the counts."""
    return [
        *choice(tokens=spelled("ab"), finish_reason="stop"),
        Chunk({"choices": [], "usage": usage}),
        *ends(None),
    ]


UNRELIABLE: dict[str, tuple[Script, str]] = {
    "text only": ([Delta({"content": "Hello"})], "gives no token ids"),
    "text only, at once": (choice(finish_reason="stop"), "gives no token ids"),
    "text only, later": ([*says_ids(97), Delta({"content": "Hello"})], "gives no token ids"),
    "another vocabulary": (choice(tokens=[VOCAB_SIZE]), f"sampled {VOCAB_SIZE}, which is no token"),
    "a negative id": (choice(tokens=[-1]), "sampled -1, which is no token"),
    "ids in words": (choice(tokens=["a"]), "expected a chunk of a completion"),
    "no reason to end": ([*says_ids(97), *ends(None)], "ended without a reason to"),
    "cut off": ([*says_ids(97), *ends(None, says_done=False)], "ended without a reason to"),
    "another end": ([*says_ids(97), *ends("abort")], "ended with 'abort'"),
    "nothing": (ends("length"), "sampled nothing"),
    "more was read": (counts(prompt_tokens=999), "tokens and read 999"),
    "more was sampled": (counts(completion_tokens=9), "sampled 9 tokens and gave the ids of 3"),
}


@pytest.mark.parametrize("name", UNRELIABLE)
async def test_an_answer_that_cannot_be_relied_on_fails_its_run_and_no_other(name: str) -> None:
    script, says = UNRELIABLE[name]
    async with completing(script, model=HashedModel(1)) as (_, engine):
        run = await open_run(engine)

        with pytest.raises(EngineError, match=says):
            await sample(engine, run)

        assert run.state is RunState.FAILED
        other = await open_run(engine)
        await sample(engine, other)
        assert other.state is RunState.COMPLETED


async def test_the_wrong_dialect_is_told_by_its_answer() -> None:
    async with completing(model=HashedModel(0), dialect="vllm", speech=as_cerebras) as (_, engine):
        with pytest.raises(EngineError, match="gives no token ids"):
            await sample(engine, await open_run(engine))


async def test_an_error_in_the_middle_fails_the_run_it_hits_while_others_go_on() -> None:
    async with completing(
        [*says_ids(*spelled("abba")), *breaks(503, "worn out")], model=HashedModel(2)
    ) as (_, engine):
        broken, whole = await open_run(engine, "Hi"), await open_run(engine, "Ho")

        results = await asyncio.gather(
            sample(engine, broken), sample(engine, whole), return_exceptions=True
        )

        assert isinstance(results[0], EndpointError)
        assert "worn out" in str(results[0])
        assert (broken.state, whole.state) == (RunState.FAILED, RunState.COMPLETED)
        assert sampled_spans(broken) == [tuple(spelled("abba"))]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param([*choice(text=""), *breaks(503)], id="an error"),
        pytest.param([*choice(text=""), *ends(None)], id="an end without a reason"),
        pytest.param(ends("abort"), id="an end for no good reason"),
    ],
)
async def test_what_breaks_before_the_first_token_is_asked_for_again(fault: Script) -> None:
    patient = {"patience_seconds": DEADLINE_SECONDS}
    script = choice(tokens=[AB, IM_END], finish_reason="stop")
    async with completing(*[fault] * 4, script, at_endpoint=patient) as (fake, engine):
        run = await open_run(engine)
        ended = await sample_once(engine, run)

        assert ended.token_ids == (AB, IM_END)
        assert run.segments[0].endpoint is not None
        assert run.segments[0].endpoint["tries"] == len(fake.requests) == 5


async def test_what_the_endpoint_does_not_take_is_left_out() -> None:
    omitted = frozenset({"seed", "stream_options"})
    async with completing(model=HashedModel(0), at_endpoint={"omitted": omitted}) as (fake, engine):
        fake.answer = lambda body: choice(tokens=[IM_END], finish_reason="stop")
        await sample_once(engine, await open_run(engine))

        assert not fake.requests[0].body.keys() & omitted
        assert fake.requests[0].body["max_tokens"] > 0


async def test_what_the_endpoint_refuses_fails_the_run_with_its_code() -> None:
    script = refuses(400, "too long", code="context_length_exceeded")
    async with completing(script) as (_, engine):
        run = await open_run(engine)

        with pytest.raises(EngineError) as caught:
            await sample(engine, run)

        assert caught.value.code == "context_length_exceeded"
        assert run.state is RunState.FAILED
        assert run.segments[0].started_at is None


async def test_the_endpoint_may_break_once_the_turn_is_over() -> None:
    script = [*choice(tokens=[*spelled("ab"), IM_END], finish_reason="stop"), *breaks(500)]
    async with completing(script) as (_, engine):
        ended = await sample_once(engine, await open_run(engine))

        assert ended.token_ids == (*spelled("ab"), IM_END)


async def test_a_model_that_the_endpoint_does_not_have_is_told_at_the_start() -> None:
    async with fake_endpoint() as fake:
        endpoint = Endpoint(EndpointSettings(fake.url, API_KEY))
        engine = completions_engine("gpt-6", endpoint, tiny_language())

        with pytest.raises(EngineError, match=f"no model 'gpt-6', but {MODEL}"):
            await engine.start()

        await engine.stop()
        engine.close()


async def test_what_an_engine_needs_to_know_is_asked_for() -> None:
    endpoint = Endpoint(EndpointSettings("http://127.0.0.1:1/v1"))
    language = replace(tiny_language(), max_context=None)

    with pytest.raises(ValueError, match="cerebras, vllm, not 'latin'"):
        completions_engine(MODEL, endpoint, tiny_language(), dialect="latin")
    with pytest.raises(ValueError, match="how many tokens"):
        completions_engine(MODEL, endpoint, language)
    engine = completions_engine(MODEL, endpoint, language, max_context=10)

    assert engine.max_context == 10
    assert engine.name == MODEL
    await engine.stop()
    engine.close()


# --- Stopping, and waiting ------------------------------------------------------------------------


async def test_to_leave_a_run_closes_its_stream() -> None:
    async with completing([*says_ids(*spelled("abba")), *silence()]) as (fake, engine):
        run = await open_run(engine)

        async with aclosing(engine.sample(run)) as outputs:
            async for output in outputs:
                if isinstance(output, TextDelta):
                    break

        assert run.state is RunState.CANCELLED
        await asyncio.wait_for(fake.requests[0].over.wait(), DEADLINE_SECONDS)
        assert fake.requests[0].was_left


async def test_a_run_that_is_left_before_the_endpoint_answers_holds_nothing() -> None:
    async with completing() as (fake, engine):
        was_asked = asyncio.Event()

        def answer(body: JsonObject) -> Script:
            was_asked.set()
            return silence()

        fake.answer = answer
        run = await open_run(engine)
        async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as group:
            sampling = group.create_task(sample(engine, run))
            await was_asked.wait()
            sampling.cancel()

        assert run.state is RunState.CANCELLED
        await asyncio.wait_for(fake.requests[0].over.wait(), DEADLINE_SECONDS)
        assert fake.requests[0].was_left


async def test_a_client_that_wants_no_more_gets_what_it_has_seen() -> None:
    async with completing([*says_ids(*spelled("abba")), *silence()]) as (fake, engine):
        run = await open_run(engine)

        outputs = []
        async with asyncio.timeout(DEADLINE_SECONDS), aclosing(engine.sample(run)) as given:
            async for output in given:
                outputs.append(output)
                if isinstance(output, TextDelta):
                    run.wanted_stop = StopReason.CANCELLED

        assert run.segments[0].stop_reason is StopReason.CANCELLED
        assert text_of(outputs) == text_of_ids(sampled_spans(run)[0])
        await asyncio.wait_for(fake.requests[0].over.wait(), DEADLINE_SECONDS)
        assert fake.requests[0].was_left


async def test_what_a_slow_client_does_not_take_is_not_read_for_it() -> None:
    said = [*spelled("ab" * 500), IM_END]
    async with session_at([*says_ids(*said), *ends("stop")]) as session:
        channel = session.channel
        received: list[object] = []
        while len(received) < WINDOW:
            received += await channel.receive()
        await asyncio.sleep(0.1)  # it could send all of it meanwhile, many times over

        assert WINDOW <= channel.num_sent <= WINDOW + 2  # the last chunk is whole
        session.took(len(received))
        while StopReason.END_OF_TURN not in received:
            messages = await channel.receive()
            session.took(len(messages))
            received += messages
        assert [sampled.token_id for sampled in received if isinstance(sampled, Sampled)] == said


# --- The books ------------------------------------------------------------------------------------


async def test_what_the_endpoint_has_cached_is_told_and_the_rest_was_computed_again() -> None:
    async with completing(model=HashedModel(num_calls=2)) as (fake, engine):
        run = await open_run(engine, LONG)

        await sample(engine, run)

        cached = [request.cached_tokens for request in fake.requests]
        assert cached[0] == 0 < cached[1] <= cached[2]
        assert [segment.cached_tokens for segment in run.segments] == cached
        ends_at = [s.input_tokens + s.output_tokens - 1 for s in run.segments]
        again = [ends_at[0] - cached[1], ends_at[1] - cached[2]]
        assert run.tokens_reforwarded == engine.counters.tokens_reforwarded == sum(again)
        assert run.num_inherited == 0
        assert [s.tokens_forwarded for s in run.segments] == [
            end - hit for end, hit in zip(ends_at, cached, strict=True)
        ]
        assert engine.counters.tokens_forwarded == run.tokens_forwarded
        assert engine.counters.tokens_sampled == sum(s.output_tokens for s in run.segments)


async def test_what_others_have_left_in_the_cache_is_inherited() -> None:
    async with completing(model=HashedModel(num_calls=0)) as (_, engine):
        await sample(engine, await open_run(engine, LONG))
        run = await open_run(engine, LONG)

        await sample(engine, run)

        assert run.num_inherited == run.segments[0].cached_tokens > 0
        assert run.tokens_reforwarded == 0
        assert run.tokens_forwarded == len(run.tokens) - 1 - run.num_inherited


async def test_a_segment_knows_its_times_and_what_the_endpoint_tells() -> None:
    async with completing(model=HashedModel(num_calls=0)) as (_, engine):
        run = await open_run(engine)

        await sample(engine, run)

        segment = run.segments[0]
        assert segment.started_at is not None
        assert segment.first_token_at is not None
        assert segment.ended_at is not None
        assert segment.requested_at <= segment.started_at <= segment.first_token_at
        assert segment.first_token_at <= segment.ended_at
        assert segment.endpoint is not None
        assert segment.endpoint["tries"] == 1
        assert segment.endpoint["time_info"]["queue_time"] == 0.0


async def test_nothing_is_claimed_of_a_cache() -> None:
    async with completing() as (_, engine):
        assert engine.capabilities.as_json() == {
            "keeps_kv": False,
            "token_exact": True,
            "drops_pending_token": False,
            "grammar": False,
        }
        assert engine.new_snapshot([IM_START]) is None
        assert engine.kv_tokens == 0


# --- Log-probabilities ----------------------------------------------------------------------------


async def logprobs_of(script: Script, dialect: str) -> list[TokenLogprobs | None]:
    """Return what is known of each token of ``script``."""
    async with session_at(script, dialect, replace(GREEDY, top_logprobs=1)) as session:
        messages: list[object] = []
        while StopReason.END_OF_TURN not in messages:
            messages += await session.channel.receive()
        return [sampled.logprobs for sampled in messages if isinstance(sampled, Sampled)]


async def test_log_probabilities_are_those_of_the_ids() -> None:
    told = {
        "tokens": ["token_id:259", "token_id:2"],
        "token_logprobs": [-2.0, -0.5],
        "top_logprobs": [
            {"token_id:259": -2.0, "token_id:100": -0.2, "token_id:101": -3.0},
            {"token_id:2": -0.5, "token_id:999999": -0.1},
        ],
    }
    script = [
        *choice(token_ids=[AB, IM_END], logprobs=told, finish_reason="stop"),
        *ends(None),
    ]

    known = await logprobs_of(script, "vllm")

    assert known == [
        TokenLogprobs(AB, -2.0, ((100, -0.2),)),
        TokenLogprobs(IM_END, -0.5, ((IM_END, -0.5),)),
    ]


async def test_tokens_that_are_spelled_as_text_are_left_out() -> None:
    told = {"tokens": ["5"], "token_logprobs": [-2.0], "top_logprobs": [{"5": -2.0, "7": -0.2}]}
    script = [*choice(tokens=[AB], logprobs=told), *ends("stop")]

    known = await logprobs_of(script, "cerebras")

    assert known == [TokenLogprobs(AB, -2.0), None]


async def test_log_probabilities_of_who_knows_what_are_left_out() -> None:
    told = {"tokens": ["ab"], "token_logprobs": [-2.0], "top_logprobs": None}
    script = [*choice(tokens=[AB, AB], logprobs=told), *choice(tokens=[AB]), *ends("stop")]

    assert await logprobs_of(script, "cerebras") == [None] * 4


# --- Nothing is constrained -----------------------------------------------------------------------

STRICT = FunctionTool("f", None, {"type": "object", "properties": {}}, strict=True)
PATTERN = CustomTool("g", format=CustomFormat("regex", "a+"))
JSON = TextFormat(TextFormatKind.JSON_OBJECT)

BINDING = {
    "a call": Constraint((WEATHER,), min_calls=1),
    "JSON": Constraint(text_format=JSON),
    "a strict schema": Constraint((WEATHER, STRICT)),
    "a grammar": Constraint((PATTERN,)),
    "all of it": Constraint(forced_ids=(AB, IM_END)),
}
FREE = {
    "text": Constraint(),
    "calls if it likes": Constraint((WEATHER, CustomTool("h"))),
    "one at most": Constraint((WEATHER,), max_calls=1),
    "none": Constraint((WEATHER,), max_calls=0),
}


@pytest.mark.parametrize("name", BINDING)
async def test_what_would_bind_a_turn_is_refused_before_it_is_sampled(name: str) -> None:
    async with completing(model=HashedModel(0)) as (fake, engine):
        with pytest.raises(GrammarError, match="this model cannot be held to"):
            await engine.check_constraint(BINDING[name])

        run = engine.open_run("run", [IM_START], GREEDY, BINDING[name])
        with pytest.raises(EngineError):
            await sample(engine, run)
        assert fake.requests == []


@pytest.mark.parametrize("name", FREE)
async def test_what_leaves_a_turn_free_is_sampled(name: str) -> None:
    async with completing(model=HashedModel(0)) as (_, engine):
        await engine.check_constraint(FREE[name])
        run = engine.open_run("run", [IM_START], GREEDY, FREE[name])

        await sample(engine, run)

        assert run.state is RunState.COMPLETED


async def test_tools_and_formats_are_refused_by_themselves() -> None:
    async with completing() as (_, engine):
        await engine.check_tool(WEATHER)
        await engine.check_tool(CustomTool("h"))
        await engine.check_text_format(TextFormat())

        with pytest.raises(GrammarError, match="the schema of `f`"):
            await engine.check_tool(STRICT)
        with pytest.raises(GrammarError, match="the grammar of `g`"):
            await engine.check_tool(PATTERN)
        with pytest.raises(GrammarError, match="JSON"):
            await engine.check_text_format(JSON)


async def test_the_markers_of_calls_are_text_where_none_may_be_made() -> None:
    async with completing([*says_ids(*spelled(CALL), IM_END), *ends("stop")]) as (_, engine):
        outputs = await sample(engine, await open_run(engine, constraint=FREE["none"]))

        assert text_of(outputs) == CALL


async def test_a_free_model_may_call_twice_at_once_and_with_any_arguments() -> None:
    odd = call_text("get_weather", '{"town": [}')
    async with completing(
        [*says_ids(*spelled(f"Hm.{CALL}\n{odd}"), IM_END), *ends("stop")], model=HashedModel(0)
    ) as (_, engine):
        run = await open_run(engine)

        outputs = await sample(engine, run)

        calls = [output.call for output in outputs if isinstance(output, CallDone)]
        assert [call.arguments for call in calls if isinstance(call, FunctionCall)] == [
            '{"city": "Oslo"}',
            '{"town": [}}',  # which ends where the braces do
        ]
        assert run.state is RunState.COMPLETED


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (CALL.partition("</")[0], '{"city": "Oslo"}'),
        (CALL.partition("}")[0], '{"city": "Oslo"'),
        (CALL.partition('"Os')[0], '{"city": '),
    ],
)
async def test_a_call_in_which_a_free_model_ends_its_turn_is_what_it_is(
    said: str, arguments: str
) -> None:
    async with completing(
        [*says_ids(*spelled(said), IM_END), *ends("stop")], model=HashedModel(0)
    ) as (fake, engine):
        run = await open_run(engine)

        outputs = await sample(engine, run)

        [call] = [output.call for output in outputs if isinstance(output, CallDone)]
        assert isinstance(call, FunctionCall)
        assert call.arguments == arguments
        assert run.segments[0].stop_reason is StopReason.TOOL_CALLS
        assert run.state is RunState.COMPLETED
        start = run.segments[0].input_tokens
        assert fake.requests[1].body["prompt"][start:][: len(said) + 1] == [*spelled(said), IM_END]


async def test_a_call_of_nobody_knows_what_is_text() -> None:
    said = '<tool_call>\n{"name": "get_we'
    async with completing([*says_ids(*spelled(said), IM_END), *ends("stop")]) as (_, engine):
        run = await open_run(engine)

        outputs = await sample(engine, run)

        assert text_of(outputs) == said
        assert run.segments[0].stop_reason is StopReason.END_OF_TURN
