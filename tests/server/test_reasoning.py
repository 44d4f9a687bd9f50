"""What a model thinks before it speaks is an item of its own, and never part of the answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocol.sealed import seal
from sampler.chat_template import TemplateFormat
from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length, post, post_streamed
from tests.server.models import OSLO, THOUGHT, encoded, scripted_engine, spelled_out
from tests.server.running import BODY, Event, calls_in, output, serving, text_in

QUESTION = {"role": "user", "content": BODY["input"]}
KEEPING = Settings(recent_responses=4)
SEALED = ["reasoning.encrypted_content"]


def thinking_engine(*turns: str | Sequence[int]) -> LocalEngine:
    """Return an engine whose model says ``turns``, in which there may be thoughts."""
    return scripted_engine(*turns, thinks=True)


def told(events: Sequence[Event]) -> list[str]:
    """Return the types of ``events`` between those of the response itself."""
    return [event["type"].removeprefix("response.") for event in events[2:-1]]


# --- Events --------------------------------------------------------------------------------------


async def test_thoughts_are_told_in_the_models_words() -> None:
    async with serving(engine=thinking_engine(THOUGHT + "Sun.")) as server:
        events = await post_streamed(server)

        (thought, message) = events[-1]["response"]["output"]
        assert told(events)[:6] == [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert thought["summary"] == []
        assert thought["status"] == "completed"
        assert "encrypted_content" not in thought
        assert message["content"][0]["text"] == "Sun."


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
async def test_thoughts_are_told_as_a_summary_if_one_is_asked_for(summary: str) -> None:
    async with serving(engine=thinking_engine(THOUGHT + "Sun.")) as server:
        events = await post_streamed(server, reasoning={"summary": summary})

        thought, _ = events[-1]["response"]["output"]
        assert told(events)[:6] == [
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
        ]
        assert thought["summary"] == [{"type": "summary_text", "text": "Hm."}]
        assert thought.get("content", []) == []


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_thoughts_are_sealed_if_that_is_asked_for(summary: str | None) -> None:
    async with serving(engine=thinking_engine(THOUGHT + "Sun.")) as server:
        events = await post_streamed(server, include=SEALED, reasoning={"summary": summary})

        done = next(e["item"] for e in events if e["type"] == "response.output_item.done")
        assert done["encrypted_content"] == seal("Hm.")
        assert events[-1]["response"]["output"][0] == done


async def test_thoughts_come_before_calls_in_every_segment() -> None:
    turns = [THOUGHT + OSLO, THOUGHT + "Sun."]
    async with serving(engine=thinking_engine(*turns)) as server:
        async with server.connect("append") as client:
            first = await client.create()
            last = await client.append(output(calls_in(first)[0]))

        items = [item["type"] for item in last[-1]["response"]["output"]]
        assert items == ["reasoning", "function_call", "reasoning", "message"]


async def test_a_turn_that_ends_within_its_thoughts_is_incomplete() -> None:
    engine = thinking_engine([*spelled_out("<think>\nHmmmmm")], "Sun.")
    async with serving(engine=engine, settings=KEEPING) as server:
        events = await post_streamed(server, max_output_tokens=11)
        first = events[-1]["response"]
        last = await post(server, previous_response_id=first["id"], input="Well?")

        (thought,) = first["output"]
        assert first["status"] == thought["status"] == "incomplete"
        assert thought["content"][0]["text"] == "Hmm"
        assert first["usage"]["output_tokens_details"]["reasoning_tokens"] == 11
        assert text_in(last) == "Sun."
        assert cached_tokens(last) >= context_length(first)


async def test_a_model_may_speak_without_a_thought() -> None:
    async with serving(engine=thinking_engine("Sun.")) as server:
        response = await post(server)

        assert [item["type"] for item in response["output"]] == ["message"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


async def test_a_model_that_does_not_think_writes_the_marker_as_text() -> None:
    async with serving(engine=scripted_engine(THOUGHT + "Sun.")) as server:
        response = await post(server, tools=[])

        assert text_in(response) == THOUGHT + "Sun."


# --- Usage and wishes ----------------------------------------------------------------------------


async def test_thoughts_are_counted_apart() -> None:
    engine = thinking_engine([*spelled_out("<think>\nHm.\n</think>"), *encoded("Sun.")])
    async with serving(engine=engine) as server:
        usage = (await post(server))["usage"]

        num_thoughts = len("<think>\nHm.\n</think>")
        assert usage["output_tokens_details"]["reasoning_tokens"] == num_thoughts
        assert usage["output_tokens"] == num_thoughts + 2  # the answer, and the end of the turn


def chatml(
    messages: list[dict[str, Any]],
    *,
    tools: Any = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
) -> str:
    """Render as Qwen 3 does, whose prompt has an empty block where no thoughts are wanted."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    if add_generation_prompt:
        text += "<|im_start|>assistant\n"
        text += "<think>\n\n</think>\n\n" if enable_thinking is False else ""
    return text


@pytest.mark.parametrize("effort", ["none", "low", "xhigh", None])
async def test_a_model_that_can_be_told_not_to_think_is_told(effort: str | None) -> None:
    no_thoughts = "<think>\n\n</think>\n\n"
    model = scripted_engine(f"{no_thoughts}Sun.").model
    chat_format = TemplateFormat(model.tokenizer, chatml, thinks=True)
    async with serving(engine=LocalEngine(replace(model, chat_format=chat_format))) as server:
        response = await post(server, tools=[], reasoning={"effort": effort})

        is_told = response["usage"]["output_tokens"] == len(encoded("Sun.")) + 1
        assert is_told == (effort == "none")
        assert text_in(response) == "Sun."
        assert response["reasoning"] == {"effort": effort, "summary": None}


# --- Thoughts that come back ---------------------------------------------------------------------


def as_it_came(thought: Event) -> Event:
    return thought


def sealed_only(thought: Event) -> Event:
    """As the AI SDK, with ``store: false``, and llm send it."""
    sealed = thought["encrypted_content"]
    return {"type": "reasoning", "id": thought["id"], "encrypted_content": sealed, "summary": []}


def without_id(thought: Event) -> Event:
    """As Codex sends it."""
    return {key: value for key, value in thought.items() if key not in ("id", "status")}


def sealed_by_another_server(thought: Event) -> Event:
    return {"type": "reasoning", "encrypted_content": "gAAAAAB", "summary": [], "content": None}


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("echo", [as_it_came, sealed_only, without_id, sealed_by_another_server])
async def test_thoughts_that_come_back_cost_no_cache(echo: Any, summary: str | None) -> None:
    members: Event = {"store": False, "include": SEALED, "reasoning": {"summary": summary}}
    engine = thinking_engine(THOUGHT + OSLO, "Sun.")
    async with serving(engine=engine, settings=KEEPING) as server:
        first = await post(server, **members)
        thought, call = first["output"]
        history = [QUESTION, echo(thought), call, output(call)]
        last = await post(server, **members, input=history)

        assert cached_tokens(last) == context_length(first)
        assert text_in(last) == "Sun."


async def test_thoughts_may_come_back_in_an_append() -> None:
    """Codex up to 0.98 repeats all that the model said."""
    engine = thinking_engine(f"{THOUGHT}Rain.{OSLO}", "Sun.")
    async with serving(engine=engine) as server, server.connect("append") as client:
        first = (await client.create(include=SEALED))[-1]["response"]
        thought, message, call = first["output"]
        echo = [without_id(item) for item in (thought, message, call)]
        last = await client.append(*echo, output(call))

        assert text_in(last[-1]["response"]).endswith("Sun.")
        assert cached_tokens(last[-1]["response"]) == context_length(first)


async def test_thoughts_that_nobody_here_thought_are_not_read() -> None:
    summary = [{"type": "summary_text", "text": "Hm."}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": summary}
    async with serving("Sun.") as server:
        with_it = await post(server, input=[thought, QUESTION])
        without = await post(server, input=[QUESTION])

        assert with_it["usage"] == without["usage"]
