"""Which engine ``--model`` names, and what is said where it cannot be had."""

from typing import Any

import pytest

from sampler.capabilities import Capabilities
from server.engine_choice import (
    EngineChoiceError,
    Kind,
    RemoteOptions,
    check_is_for_local,
    kind_of,
    remote_engine,
)
from tests.sampler.engines.fake_endpoint import fake_endpoint, says
from tests.server.running import serving, text_in

KEYS = {"CEREBRAS_API_KEY": "csk-fake-0123456789abcdef", "OPENAI_API_KEY": "sk-1"}
URL = "http://127.0.0.1:9/v1"


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
        ("openai-chat:m", {"endpoint": "host/v1"}, "--endpoint host/v1: the URL of an endpoint"),
        (
            "openai-chat:m",
            {"endpoint": "http:///v1"},
            "--endpoint http:///v1: the URL of an endpoint",
        ),
        (
            "openai-completions:m",
            {"endpoint": URL, "dialect": "french"},
            "--model openai-completions:m: the dialect is one of",
        ),
        ("vllm:smollm2-135m-instruct", {}, "--model vllm:smollm2-135m-instruct: "),
        ("vllm:smollm2-135m-instruct", {"engine_args": ("x",)}, "--model vllm:"),
    ],
)
def test_what_is_missing_is_said(model: str, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineChoiceError) as error:
        remote_engine(model, options(**chosen))

    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "chosen",
    [
        {"endpoint": URL},
        {"reasoning_field": "reasoning"},
        {"tokenizer": "x"},
        {"engine_args": ("a=1",)},
    ],
)
def test_what_means_nothing_to_a_local_model_is_refused(chosen: dict[str, Any]) -> None:
    check_is_for_local(options())
    with pytest.raises(EngineChoiceError, match="elsewhere: cerebras:NAME, openai-chat:NAME"):
        check_is_for_local(options(**chosen))


@pytest.mark.parametrize("kind", ["cerebras", "openai-chat", "openai-completions"])
async def test_each_endpoint_is_asked_in_its_own_way(kind: str) -> None:
    async with fake_endpoint(says("It is dry.")) as fake:
        fake.checks_key = False
        environment = KEYS | {"CEREBRAS_BASE_URL": fake.url}
        endpoint = None if kind == "cerebras" else fake.url
        chosen = options(endpoint=endpoint, environment=environment, dialect="cerebras")
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
