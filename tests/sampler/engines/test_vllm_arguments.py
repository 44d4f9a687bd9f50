"""What an operator may have of vLLM, and what has to be as it is."""

import pytest

from sampler.engines.vllm.arguments import SETTINGS, engine_arguments, parse_engine_args
from sampler.engines.vllm.library import VllmError


def test_values_are_json_where_they_are_json() -> None:
    texts = [
        "tensor_parallel_size=2",
        "gpu-memory-utilization=0.8",
        "enforce_eager=true",
        "dtype=float32",
        'hf_overrides={"a": [1]}',
        "quantization=",
        "a=b=c",
    ]

    assert parse_engine_args(texts) == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.8,
        "enforce_eager": True,
        "dtype": "float32",
        "hf_overrides": {"a": [1]},
        "quantization": "",
        "a": "b=c",
    }


@pytest.mark.parametrize("text", ["tensor_parallel_size", "=2", ""])
def test_an_argument_has_a_key_and_a_value(text: str) -> None:
    with pytest.raises(VllmError, match="key=value"):
        parse_engine_args([text])


@pytest.mark.parametrize(
    "key", ["model", "logits_processors", "additional_config", "async_scheduling"]
)
def test_what_has_to_be_as_it_is_cannot_be_given(key: str) -> None:
    with pytest.raises(VllmError, match=f"{key} is set by the server"):
        engine_arguments("m", {key: None}, {})


def test_speculative_decoding_is_refused() -> None:
    with pytest.raises(VllmError, match="behind our back"):
        engine_arguments("m", {"speculative_config": {}}, {})


def test_all_else_is_passed_on() -> None:
    arguments = engine_arguments("m", {"max_model_len": 99, "disable_log_stats": False}, {"a": 1})

    assert arguments["model"] == "m"
    assert arguments["max_model_len"] == 99
    assert arguments["disable_log_stats"] is False
    assert arguments["enable_log_requests"] is False
    assert arguments["additional_config"] == {SETTINGS: {"a": 1}}


def test_what_is_nested_too_deeply_for_json_is_a_string() -> None:
    deep = "[" * 100_000 + "]" * 100_000

    assert parse_engine_args([f"a={deep}"]) == {"a": deep}
