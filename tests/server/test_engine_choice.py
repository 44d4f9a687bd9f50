"""Which engine ``--model`` names, what it is told, and what is said where it cannot be had."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sampler.capabilities import Capabilities
from sampler.embedded_model import EMBEDDED_MODEL_NAME
from sampler.engines.endpoint.client import Endpoint, EndpointSettings
from sampler.engines.vllm import backend
from sampler.engines.vllm.arguments import SETTINGS
from sampler.language import LoadedLanguage
from sampler.suspension import Suspension
from sampler.token_engine import TokenEngine
from server import engine_choice
from server.engine_choice import (
    CEREBRAS_URL,
    EngineChoiceError,
    Kind,
    RemoteOptions,
    check_choice,
    kind_of,
    remote_engine,
)
from tests.sampler.engines.fake_async_llm import FakeAsyncLLM
from tests.sampler.engines.fake_endpoint import FakeEndpoint, calls, fake_endpoint, says, thinks
from tests.sampler.engines.fake_engine_core import hash_model
from tests.sampler.engines.vllm_runs import DEADLINE_SECONDS, Vllm, language, library, play
from tests.sampler.runs import CALL_OSLO, VOCAB_SIZE
from tests.server.running import TOOL, Client, calls_in, output, serving, text_in
from tests.tiny_model import IM_END

CEREBRAS_KEY, OPENAI_KEY = "csk-fake-0123456789abcdef", "sk-1"
KEYS = {"CEREBRAS_API_KEY": CEREBRAS_KEY, "OPENAI_API_KEY": OPENAI_KEY}
URL = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have a tiny language loaded in the place of any, and return what was asked for."""
    sources = []

    def load_language(source: Any, **_: Any) -> LoadedLanguage:
        sources.append(source)
        return language()

    monkeypatch.setattr(engine_choice, "load_language", load_language)
    return sources


def options(**members: Any) -> RemoteOptions:
    return RemoteOptions(**{"environment": KEYS, **members})


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (None, None),
        ("smollm2-135m-instruct", None),
        ("org/name", None),
        ("./cerebras:", None),
        ("C:/models/x", None),
        ("cerebras:gpt-oss-120b", Kind.CEREBRAS),
        ("cerebras:", Kind.CEREBRAS),
        ("openai-chat:a:b", Kind.OPENAI_CHAT),
        ("openai-completions:org/name", Kind.OPENAI_COMPLETIONS),
        ("vllm:./model", Kind.VLLM),
    ],
)
def test_the_kind_is_what_comes_before_the_colon(model: str | None, kind: Kind | None) -> None:
    assert kind_of(model) is kind


@pytest.mark.parametrize(
    ("model", "chosen", "message"),
    [
        ("cerebras:", {}, "--model cerebras: needs the name of a model"),
        ("cerebras:m", {"environment": {}}, "--model cerebras:m needs a key in CEREBRAS_API_KEY"),
        ("openai-chat:m", {}, "--model openai-chat:m needs an --endpoint"),
        ("openai-completions:m", {}, "--model openai-completions:m needs an --endpoint"),
        ("openai-chat:m", {"endpoint": "host/v1"}, "endpoint host/v1: the URL of an endpoint"),
        (
            "openai-chat:m",
            {"endpoint": "http:///v1"},
            "endpoint http:///v1: the URL of an endpoint",
        ),
        ("openai-chat:m", {"endpoint": "http://host:x/v1"}, "endpoint http://host:x/v1: "),
        (
            "openai-chat:m",
            {"endpoint": URL, "omitted": frozenset({"stream"})},
            "--endpoint-omit: every request needs its stream",
        ),
        (
            "cerebras:m",
            {"max_tokens_member": "model"},
            "--endpoint-max-tokens-member: every request needs its model",
        ),
        (
            "cerebras:m",
            {"max_tokens_member": ""},
            "--endpoint-max-tokens-member: the member that bounds what is sampled has a name",
        ),
        (
            "openai-completions:m",
            {"endpoint": URL, "silence_seconds": 0.0},
            "--endpoint-silence: an endpoint is given some time",
        ),
        (
            "openai-chat:m",
            {"endpoint": URL, "max_concurrent": 0},
            "--endpoint-concurrency: an endpoint takes at least one",
        ),
        ("cerebras:m", {"endpoint": ""}, "endpoint : the URL of an endpoint begins with"),
        (
            "openai-chat:m",
            {"endpoint": URL, "environment": {"OPENAI_API_KEY": "sk\n"}},
            "OPENAI_API_KEY: an API key has no such characters",
        ),
        (
            "openai-completions:m",
            {"endpoint": URL, "dialect": "french"},
            "--model openai-completions:m: the dialect is one of",
        ),
        ("vllm:org/name", {}, "--model vllm:org/name: vLLM is not installed"),
        ("vllm:org/name", {"engine_args": ("x",)}, "--model vllm:org/name: an engine argument"),
    ],
)
def test_what_is_missing_is_said(model: str, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineChoiceError) as error:
        remote_engine(model, options(**chosen))

    assert str(error.value).startswith(message)


# What is chosen, and of which kinds it can be.
CHOICES: Mapping[str, tuple[dict[str, Any], str]] = {
    "--endpoint": ({"endpoint": URL}, "cerebras openai-chat openai-completions"),
    "--endpoint-dialect": ({"dialect": "cerebras"}, "openai-completions"),
    "--endpoint-reasoning": ({"reasoning_field": "thoughts"}, "cerebras openai-chat"),
    "--tokenizer": ({"tokenizer": EMBEDDED_MODEL_NAME}, "openai-completions vllm"),
    "--endpoint-concurrency": ({"max_concurrent": 3}, "cerebras openai-chat openai-completions"),
    "--endpoint-patience": ({"patience_seconds": 0.0}, "cerebras openai-chat openai-completions"),
    "--endpoint-silence": ({"silence_seconds": 9.0}, "cerebras openai-chat openai-completions"),
    "--endpoint-omit": (
        {"omitted": frozenset({"seed"})},
        "cerebras openai-chat openai-completions",
    ),
    "--endpoint-max-tokens-member": (
        {"max_tokens_member": "max_tokens"},
        "cerebras openai-chat",
    ),
    "--engine-arg": ({"engine_args": ("a=1",)}, "vllm"),
}


@pytest.mark.parametrize("option", CHOICES)
@pytest.mark.parametrize("kind", [None, *Kind])
def test_what_means_nothing_to_an_engine_is_refused(kind: Kind | None, option: str) -> None:
    chosen, kinds = CHOICES[option]
    model = None if kind is None else f"{kind}:m"
    usual = {"endpoint": URL} if kind in ("openai-chat", "openai-completions") else {}
    check_choice(model, options(**usual))
    if kind in kinds.split():
        check_choice(model, options(**(usual | chosen)))
        return

    with pytest.raises(EngineChoiceError) as error:
        check_choice(model, options(**(usual | chosen)))

    named = " or ".join(f"{kind}:NAME" for kind in kinds.split())
    assert str(error.value) == f"{option} goes with --model {named} only"


# --- Endpoints -----------------------------------------------------------------------------------


def settings_of(
    monkeypatch: pytest.MonkeyPatch, model: str, chosen: RemoteOptions
) -> EndpointSettings:
    """Return what the endpoint of an engine is told."""
    made: list[Endpoint] = []

    def endpoint(settings: EndpointSettings) -> Endpoint:
        made.append(Endpoint(settings))
        return made[0]

    monkeypatch.setattr(engine_choice, "Endpoint", endpoint)
    remote_engine(model, chosen)
    return made[0].settings


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("cerebras:m", CEREBRAS_KEY),
        ("openai-chat:m", OPENAI_KEY),
        ("openai-completions:m", OPENAI_KEY),
    ],
)
@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({}, {}),
        ({"max_concurrent": 3}, {"max_concurrent": 3}),
        ({"patience_seconds": 0.0}, {"patience_seconds": 0.0}),
        ({"silence_seconds": 9.0}, {"read_timeout_seconds": 9.0}),
        ({"omitted": frozenset({"seed"})}, {"omitted": frozenset({"seed"})}),
    ],
)
def test_an_endpoint_is_told_what_was_chosen(
    model: str,
    key: str,
    chosen: dict[str, Any],
    told: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(monkeypatch, model, options(endpoint=URL, **chosen))

    assert settings == EndpointSettings(URL, key, **told)


@pytest.mark.parametrize(
    ("model", "chosen", "told"),
    [
        ("cerebras:m", {}, EndpointSettings(CEREBRAS_URL, CEREBRAS_KEY)),
        (
            "cerebras:m",
            {"environment": KEYS | {"CEREBRAS_BASE_URL": URL}},
            EndpointSettings(URL, CEREBRAS_KEY),
        ),
        (
            "cerebras:m",
            {"max_tokens_member": "max_tokens"},
            EndpointSettings(CEREBRAS_URL, CEREBRAS_KEY, max_tokens_member="max_tokens"),
        ),
        (
            "openai-chat:m",
            {"endpoint": URL, "environment": {}, "max_tokens_member": "max_tokens"},
            EndpointSettings(URL, None, max_tokens_member="max_tokens"),
        ),
        (
            "openai-completions:m",
            {"endpoint": URL, "dialect": "cerebras"},
            EndpointSettings(URL, CEREBRAS_KEY),
        ),
    ],
)
def test_each_endpoint_has_its_url_and_its_key(
    model: str, chosen: dict[str, Any], told: EndpointSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_of(monkeypatch, model, options(**chosen)) == told


@asynccontextmanager
async def client_of(
    fake: FakeEndpoint, kind: str, dialect: str | None = None, **chosen: Any
) -> AsyncIterator[Client]:
    """Serve what ``fake`` samples, and open a WebSocket."""
    engine = remote_engine(f"{kind}:{fake.models[0]}", options(endpoint=fake.url, **chosen))
    async with serving(engine=engine) as server, server.connect(dialect) as client:
        yield client


def test_the_tokenizer_of_an_endpoint_is_what_was_chosen(sources: list[Any]) -> None:
    for tokenizer in (None, "org/name"):
        remote_engine("openai-completions:m", options(endpoint=URL, tokenizer=tokenizer))

    assert sources == [None, "org/name"]


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        ("cerebras", "max_completion_tokens"),
        ("openai-chat", "max_completion_tokens"),
        ("openai-completions", "max_tokens"),
    ],
)
async def test_a_request_is_bounded_by_what_was_chosen(kind: str, member: str) -> None:
    async with fake_endpoint(says("It is dry.")) as fake:
        fake.checks_key = False
        async with client_of(fake, kind, max_tokens=77) as client:
            await client.create()

        assert fake.requests[-1].body[member] == 77


@pytest.mark.parametrize(
    ("kind", "chosen", "member"),
    [
        ("cerebras", {}, "reasoning"),
        ("cerebras", {"reasoning_field": "thoughts"}, "thoughts"),
        ("openai-chat", {}, None),
        ("openai-chat", {"reasoning_field": "thoughts"}, "thoughts"),
    ],
)
async def test_thoughts_go_back_where_it_was_chosen(
    kind: str, chosen: dict[str, Any], member: str | None
) -> None:
    scripts = [*thinks("Hm."), *calls((TOOL["name"], "{}"))], says("It is dry.")
    async with fake_endpoint(*scripts) as fake:
        fake.checks_key = False
        async with client_of(fake, kind, "append", **chosen) as client:
            (call,) = calls_in(await client.create())
            await client.append(output(call))

        message = fake.requests[-1].body["messages"][1]
        assert message.pop(member, None) == (None if member is None else "Hm.")
        assert message.keys() == {"role", "content", "tool_calls"}


@pytest.mark.parametrize("is_openai", [True, False])
async def test_only_the_endpoint_of_openai_is_sent_a_part_of_the_tools_as_such(
    is_openai: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_openai:
        monkeypatch.setattr(engine_choice, "_OPENAI_HOST", "127.0.0.1")
    named = {"type": "function", "name": TOOL["name"]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    async with fake_endpoint(says("It is dry.")) as fake:
        fake.checks_key = False
        async with client_of(fake, "openai-chat") as client:
            await client.create(tools=[TOOL, {**TOOL, "name": "get_news"}], tool_choice=choice)

        sent = fake.requests[-1].body["tool_choice"]
        assert sent == "auto" if not is_openai else sent["type"] == "allowed_tools"


@pytest.mark.parametrize(("kind", "promises"), [("cerebras", True), ("openai-chat", False)])
async def test_only_cerebras_promises_to_keep_a_prefix(
    kind: str, promises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "CEREBRAS_CACHE_SECONDS", 0.0)
    async with fake_endpoint(calls((TOOL["name"], "{}")), says("It is dry.")) as fake:
        fake.checks_key = False
        async with client_of(fake, kind, "append") as client:
            (call,) = calls_in(await client.create())
            last = await client.append(output(call))

    (turn,) = last[-1]["response"]["suspend:run"]["turns"]
    assert turn["endpoint"].get("cache_may_be_gone", False) is promises


@pytest.mark.parametrize("kind", ["cerebras", "openai-chat", "openai-completions"])
async def test_each_endpoint_is_asked_in_its_own_way(kind: str) -> None:
    async with fake_endpoint(says("It is dry.")) as fake:
        fake.checks_key = False
        environment = KEYS | {"CEREBRAS_BASE_URL": fake.url}
        endpoint = None if kind == "cerebras" else fake.url
        chosen = options(endpoint=endpoint, environment=environment)
        engine = remote_engine(f"{kind}:{fake.models[0]}", chosen)
        await engine.start()
        is_exact = kind == "openai-completions"
        assert engine.name == fake.models[0]
        assert engine.capabilities == Capabilities(
            keeps_kv=False, token_exact=is_exact, drops_pending_token=False, grammar=False
        )
        async with serving(engine=engine) as server:
            if is_exact:
                return  # what it says are words here, and no token ids
            async with server.connect() as client:
                events = await client.create()
                body = fake.requests[-1].body

        assert text_in(events[-1]["response"]) == "It is dry."
        assert ("clear_thinking" in body) == (kind == "cerebras")
        assert body["max_completion_tokens"] == RemoteOptions.max_tokens


# --- vLLM ----------------------------------------------------------------------------------------


@asynccontextmanager
async def vllm_of(
    monkeypatch: pytest.MonkeyPatch, name: str = "org/name", **chosen: Any
) -> AsyncIterator[tuple[Vllm, Mapping[str, Any]]]:
    """Run vLLM's engine, over its fake, and give the arguments that it was made with too."""
    model = hash_model(VOCAB_SIZE)
    made: list[tuple[FakeAsyncLLM, Mapping[str, Any]]] = []

    def make_llm(arguments: Mapping[str, object]) -> FakeAsyncLLM:
        llm = FakeAsyncLLM(vocab_size=VOCAB_SIZE, model=model, max_model_len=512)
        made.append((llm, arguments))
        return llm

    monkeypatch.setattr(backend, "load_library", lambda: library(make_llm))
    engine = remote_engine(f"vllm:{name}", options(**chosen))
    assert isinstance(engine, TokenEngine)
    await engine.start()
    ((llm, arguments),) = made
    try:
        yield Vllm(engine, llm, model), arguments
    finally:
        await engine.stop()
        engine.close()
        await llm.wait_closed()


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({}, {}),
        ({"name": EMBEDDED_MODEL_NAME}, {"max_forced_string": 64}),
        ({"name": EMBEDDED_MODEL_NAME, "max_forced_string": 0}, {"max_forced_string": 0}),
        ({"max_forced_string": 5}, {"max_forced_string": 5}),
        ({"tokenizer": "org/other"}, {"language": "org/other"}),
        (
            {"engine_args": ("max-num-seqs=3", "dtype=float32")},
            {"max_num_seqs": 3, "dtype": "float32"},
        ),
    ],
)
async def test_vllm_is_told_what_was_chosen(
    chosen: dict[str, Any],
    told: dict[str, Any],
    sources: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with vllm_of(monkeypatch, **chosen) as (vllm, arguments):
        given = {**arguments, **arguments["additional_config"][SETTINGS]}

    usual = {"language": arguments["model"], "max_forced_string": 0}
    assert given == given | usual | told
    assert [str(source) for source in sources] == [given["language"]]
    assert vllm.engine.name == chosen.get("name", "org/name")


async def test_vllm_keeps_a_suspended_run_as_long_as_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with vllm_of(monkeypatch, suspend_ttl_seconds=0.01) as (vllm, _):
        vllm.llm.core.turns.extend([(CALL_OSLO, IM_END), (IM_END,)])

        async def until_it_is_gone(suspension: Suspension) -> None:
            assert vllm.engine.kv_tokens > 0
            async with asyncio.timeout(DEADLINE_SECONDS):
                while vllm.engine.kv_tokens > 0:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.005)

        await play(vllm, vllm.open(range(40, 85)), [range(5)], until_it_is_gone)

        assert vllm.engine.counters.discards == 1
