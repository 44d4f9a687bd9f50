"""vLLM's engine arguments: those that an operator gives, and those that have to be as they are.

Parallelism, quantisation, memory and the like are vLLM's business, and are passed through.
"""

import json
from collections.abc import Iterable, Mapping

from sampler.engines.vllm.library import VllmError

PROCESSOR = "sampler.engines.vllm.worker:Processor"
"""Where vLLM's processes find what samples."""

SETTINGS = "suspended_sampling"
"""The member of ``additional_config`` that has its settings."""

_WITHOUT = {
    "speculative_config": "speculative decoding samples behind our back",
    "speculative_model": "speculative decoding samples behind our back",
}

_OURS: Mapping[str, object] = {
    "logits_processors": [PROCESSOR],
    "skip_tokenizer_init": True,  # it gets ids and gives ids
    "enable_log_requests": False,  # prompts are nobody's business
    "logprobs_mode": "raw_logprobs",  # the model's own, before all that steers sampling
    "async_scheduling": False,  # what was sampled last has to be known to what samples next
}


def parse_engine_args(texts: Iterable[str]) -> dict[str, object]:
    """Return the arguments that ``texts`` give, each as ``key=value``.

    A value is read as JSON where it is JSON, and is a string where it is not.

    Raises:
        VllmError: there is a text without a key.
    """
    arguments: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise VllmError(f"an engine argument is given as key=value, not {text!r}")
        try:
            arguments[key.replace("-", "_")] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[key.replace("-", "_")] = value
    return arguments


def engine_arguments(
    model: str, given: Mapping[str, object], settings: Mapping[str, object]
) -> dict[str, object]:
    """Return all arguments of an engine for ``model``.

    Args:
        model: a directory or an id of the hub.
        given: what the operator says.
        settings: of what samples in vLLM's processes.

    Raises:
        VllmError: the operator would have it otherwise than it has to be.
    """
    for key in given:
        if key in _WITHOUT:
            raise VllmError(f"the engine argument {key} cannot be used here: {_WITHOUT[key]}")
        if key in _OURS or key in ("model", "additional_config"):
            raise VllmError(f"the engine argument {key} is set by the server")
    additional = {SETTINGS: dict(settings)}
    usual = {"disable_log_stats": True}
    return {**usual, **given, **_OURS, "model": model, "additional_config": additional}
