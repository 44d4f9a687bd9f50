"""Conversations that a model's chat template refuses, and tools that a grammar cannot hold."""

from typing import Any, NoReturn

import pytest

from sampler.conversation import ConversationError
from sampler.grammar import GrammarError
from tests.server.models import OSLO
from tests.server.running import BODY, output, serving, suspended, text_in


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConversationError("the chat template refuses this: no system role")


async def test_a_conversation_that_the_template_refuses_is_a_mistake_in_the_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving("Sun.") as server, server.http() as http:
        monkeypatch.setattr(server.engine.model.chat_format, "prompt_ids", refuse)
        answer = await http.post("/v1/responses", json=BODY)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"
        assert "no system role" in answer.json()["error"]["message"]


async def test_an_append_that_the_template_refuses_leaves_the_run_suspended() -> None:
    async with suspended(OSLO, "Sun.") as (server, client, call):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.engine.model.chat_format, "suffix_ids", refuse)
            await client.send("response.append", input=[output(call)])
            error = await client.error()
        last = await client.append(output(call))

        assert error["status"] == 400
        assert error["error"]["param"] == "input"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_tools_that_are_too_much_together_are_a_mistake_in_the_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def too_much(*_: Any) -> NoReturn:
        raise GrammarError("too many functions")

    async with serving("Sun.") as server, server.http() as http:
        monkeypatch.setattr(server.engine, "check_constraint", too_much)
        answer = await http.post("/v1/responses", json=BODY)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
