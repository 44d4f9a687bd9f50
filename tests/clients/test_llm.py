"""The llm command: a tool of its own, and a schema."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from server.settings import Settings
from tests.server.models import inputs_of
from tests.server.running import DEADLINE_SECONDS, Running, serving
from tests.tiny_model import call_text

pytestmark = pytest.mark.slow  # a process for each

KEEPING = Settings(recent_responses=4)
REPORT = '{"name": "Oslo", "n": 7}'


async def llm(server: Running, folder: Path, *arguments: str) -> str:
    """Run the command with a folder of its own, and return what it prints."""
    model = {
        "model_id": "local",
        "model_name": "tiny",
        "api_base": f"{server.url}/v1",
        "responses": True,
        "supports_tools": True,
        "supports_schema": True,
    }
    # JSON is YAML. The package that the weights of our default model come in is a plugin of llm's.
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llm", "-m", "local", "--key", "x", "--no-log", *arguments),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        printed, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return printed.decode()


async def test_its_tool_is_called_and_answered(tmp_path: Path) -> None:
    call = f"Rain.{call_text('llm_version', '{}')}"
    async with serving(call, "Sun.", settings=KEEPING) as server:
        printed = await llm(server, tmp_path, "-T", "llm_version", "What version?")

        assert printed.strip().endswith("Sun.")
        assert server.engine.counters.tokens_reforwarded == 0
        tokenizer = server.engine.model.tokenizer
        read = b"".join(map(tokenizer.token_bytes, inputs_of(server.engine))).decode()
        assert read.count("What version?") == 1  # the rest was appended


async def test_an_answer_is_of_its_schema(tmp_path: Path) -> None:
    async with serving(REPORT, settings=KEEPING) as server:
        printed = await llm(server, tmp_path, "--schema", "name, n int", "Where?")

        assert json.loads(printed) == json.loads(REPORT)
