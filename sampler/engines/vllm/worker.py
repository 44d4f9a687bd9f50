"""What samples, as vLLM's processes load it. Nobody else imports this."""

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from sampler.engines.vllm.arguments import SETTINGS
from sampler.engines.vllm.processor import SegmentProcessor
from sampler.language import load_language


class Processor(SegmentProcessor, LogitsProcessor):  # type: ignore[misc]
    """A logits processor of vLLM's."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Make it, as vLLM does."""
        settings = vllm_config.additional_config[SETTINGS]
        language = load_language(settings["language"])
        super().__init__(language.tokenizer, settings["max_forced_string"])
