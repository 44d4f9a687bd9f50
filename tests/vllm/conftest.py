"""Tests of the real vLLM, in the environment that has it; elsewhere none of them is collected.

``scripts/vllm-env -m pytest tests/vllm`` runs them.
"""

import os
import warnings
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # It reads these when it is imported, and so do the processes that it starts.
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_LOGGING_LEVEL="CRITICAL",
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave alone what vLLM is warned of: it is not ours to mend."""
    if find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "ignore")  # in tests
        warnings.simplefilter("ignore")  # and when what they left is collected
