"""Real clients as they were recorded: what each sends, in which order, and what it waits for.

Long texts and tool lists are cut down to one of each kind; every member that shapes the exchange is
there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from protocol.dialect import APPEND_BETA
from tests.server.running import TOOL, Event
from tests.server.spellings import (
    Spelling,
    as_easy_messages,
    as_it_came,
    by_reference_but_calls,
    rewritten,
    rewritten_without_ids,
    with_the_type_last,
    without_ids,
    without_thoughts,
)

CHAINED_BETA = "responses_websockets=2026-02-06"


@dataclass
class Talk:
    """What a client knows of its conversation."""

    asked: list[Event]
    """What the client began with."""
    response_id: str = ""
    items: list[Event] = field(default_factory=list)
    """What the model said last."""
    added: list[Event] = field(default_factory=list)
    """What the client has to add: the outputs of its tools, or what the user says next."""
    since: list[Event] = field(default_factory=list)
    """All that was said and added, as the client repeats it."""


GoesOn: TypeAlias = Callable[[Talk], Event]
"""What a client sends when it has something to add."""


@dataclass(frozen=True)
class RecordedClient:
    """One client in one mode."""

    body: Event
    """What each of its requests has besides its input."""
    asked: Sequence[Event]
    """Its first input."""
    goes_on: GoesOn
    spells: Spelling = as_it_came
    """How it repeats what the model said, if it does."""
    takes_next_turn: GoesOn | None = None
    """What it sends once the run is over and the user speaks again; None: as after a tool."""
    is_websocket: bool = True
    path: str = "/v1/responses"
    betas: Sequence[str] = ()
    warms_up_with: Event | None = None
    """What it sends first, and has nothing sampled for."""
    ends_segments_with: str = "response.completed"
    """What tells it that its tools are to be called."""
    calls_exec: bool = False
    """Whether its tool takes free text."""


# --- How they go on ------------------------------------------------------------------------------


def appends_outputs(talk: Talk) -> Event:
    metadata = {"x-codex-turn-metadata": '{"turn_id":"t"}'}
    return {"type": "response.append", "input": talk.added, "client_metadata": metadata}


def appends_everything(talk: Talk) -> Event:
    return {"type": "response.append", "input": [*map(without_ids, talk.items), *talk.added]}


def chains(talk: Talk) -> Event:
    return {"previous_response_id": talk.response_id, "input": talk.added}


def chains_with_echo(talk: Talk) -> Event:
    echo = [without_ids(item) for item in talk.items if item["type"] == "function_call"]
    return {"previous_response_id": talk.response_id, "input": [*echo, *talk.added]}


def resends(talk: Talk) -> Event:
    return {"input": [*talk.asked, *talk.since]}


# --- What they declare ---------------------------------------------------------------------------


def text(role: str, *texts: str, **members: str) -> Event:
    parts = [{"type": "input_text", "text": each} for each in texts]
    return {"type": "message", **members, "role": role, "content": parts}


def untyped(role: str, content: str) -> Event:
    return {"role": role, "content": [{"type": "input_text", "text": content}]}


LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /(?s:.+)/"}
PARALLEL: Event = {
    "type": "function",
    "name": "update_plan",
    "description": "Plans",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"plan": {"type": "array", "items": {"type": "object"}}},
        "required": ["plan"],
        "additionalProperties": False,
    },
}
PATCH: Event = {"type": "custom", "name": "apply_patch", "description": "Edits", "format": LARK}
SEARCH: Event = {"type": "web_search", "external_web_access": True}
AGENTS: Event = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for spawning and managing sub-agents.",
    "tools": [
        {
            "type": "function",
            "name": "spawn_agent",
            "description": "Spawns",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"message": {"type": "string", "encrypted": True}},
                "additionalProperties": False,
            },
        }
    ],
}
EXEC: Event = {
    "type": "additional_tools",
    "id": "at_0192",
    "role": "developer",
    "tools": [
        {
            "type": "namespace",
            "name": "functions",
            "description": "",
            "tools": [
                {"type": "custom", "name": "exec", "description": "Runs", "format": LARK},
                {**PARALLEL, "name": "wait"},
            ],
        },
        {**AGENTS, "name": "collaboration"},
    ],
}


def codex(*tools: Event, **members: object) -> Event:
    """Return what each request of Codex holds."""
    return {
        "model": "tiny",
        "tools": [TOOL | {"strict": False}, PARALLEL, *tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0192-4f",
        **members,
    }


def codex_metadata(kind: str) -> Event:
    return {
        "client_metadata": {
            "session_id": "0192",
            "turn_id": "",
            "x-codex-turn-metadata": f'{{"request_kind":"{kind}"}}',
            "x-codex-ws-stream-request-start-ms": "1795982711000",
        }
    }


CODEX_ASKED = [text("developer", "Sandboxed."), text("user", "/work", "bash"), text("user", "Hi.")]
CODEX_ASKED_WITH_IDS = [item | {"id": f"msg_{i}"} for i, item in enumerate(CODEX_ASKED)]
INSTRUCTIONS = {"instructions": "You are Codex."}
IN_CATALOG: Event = {
    "model": "tiny",
    "stream": True,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "context": "all_turns"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0192",
    "text": {"verbosity": "low"},
}

STRICT: Event = TOOL | {
    "strict": True,
    "parameters": TOOL["parameters"] | {"additionalProperties": False},
}
AGENTS_SDK: Event = {
    "instructions": "Be brief.",
    "model": "tiny",
    "include": [],
    "tools": [STRICT],
    "stream": True,
}
AI_SDK: Event = {"model": "tiny", "tools": [STRICT | {"strict": False}], "tool_choice": "auto"}
AI_SDK_ASKED = [{"role": "system", "content": "Be brief."}, untyped("user", "Weather in Oslo?")]
OPENCODE: Event = {
    "model": "tiny",
    "store": False,
    "prompt_cache_key": "ses_1",
    "tools": [TOOL | {"strict": False}],
    "tool_choice": "auto",
}
PI: Event = {
    "model": "tiny",
    "stream": True,
    "prompt_cache_key": "0192",
    "store": False,
    "max_output_tokens": 2048,
    "tools": [TOOL],
}
WEATHER_ASKED = [{"role": "user", "content": "Weather in Oslo?"}]


# --- The clients ---------------------------------------------------------------------------------

CLIENTS: dict[str, RecordedClient] = {
    "Codex 0.87": RecordedClient(
        codex(PATCH, **INSTRUCTIONS, reasoning={"summary": "auto"}), CODEX_ASKED, appends_everything
    ),
    "Codex 0.98": RecordedClient(
        codex(PATCH, SEARCH, **INSTRUCTIONS), CODEX_ASKED, appends_everything
    ),
    "Codex 0.107": RecordedClient(
        codex(PATCH, SEARCH, **INSTRUCTIONS, **codex_metadata("turn")),
        CODEX_ASKED,
        appends_outputs,
        without_ids,
        takes_next_turn=resends,
        betas=[APPEND_BETA],
        ends_segments_with="response.done",
    ),
    "Codex 0.99, chained": RecordedClient(
        codex(PATCH, **INSTRUCTIONS), CODEX_ASKED, chains_with_echo, betas=[CHAINED_BETA]
    ),
    "Codex 0.107, chained": RecordedClient(
        codex(PATCH, SEARCH, **INSTRUCTIONS, **codex_metadata("turn")),
        CODEX_ASKED,
        chains,
        betas=[CHAINED_BETA],
        warms_up_with={"input": [], "generate": False},
    ),
    "Codex 0.171": RecordedClient(
        codex(AGENTS, SEARCH, **codex_metadata("turn")),
        CODEX_ASKED_WITH_IDS[1:],
        chains,
        betas=[CHAINED_BETA],
        warms_up_with={
            "input": CODEX_ASKED_WITH_IDS[:1],
            "generate": False,
            **codex_metadata("prewarm"),
        },
    ),
    "Codex 0.171, a model of its catalog": RecordedClient(
        IN_CATALOG | codex_metadata("turn"),
        [EXEC, *CODEX_ASKED_WITH_IDS],
        chains,
        betas=[CHAINED_BETA],
        warms_up_with={"input": [], "generate": False},
        calls_exec=True,
    ),
    "Codex 0.107, HTTP": RecordedClient(
        codex(PATCH, SEARCH, **INSTRUCTIONS), CODEX_ASKED, resends, without_ids, is_websocket=False
    ),
    "Codex 0.171, HTTP": RecordedClient(
        codex(AGENTS, SEARCH, **codex_metadata("turn")),
        CODEX_ASKED_WITH_IDS,
        resends,
        is_websocket=False,
    ),
    "openai Python, WebSocket": RecordedClient(
        {"model": "tiny", "tools": [STRICT]}, WEATHER_ASKED, chains
    ),
    "Agents SDK, HTTP": RecordedClient(AGENTS_SDK, WEATHER_ASKED, resends, is_websocket=False),
    "Agents SDK, WebSocket": RecordedClient(AGENTS_SDK, WEATHER_ASKED, resends),
    "Agents SDK, WebSocket, chained": RecordedClient(AGENTS_SDK, WEATHER_ASKED, chains),
    "Agents SDK in JavaScript, WebSocket": RecordedClient(
        AGENTS_SDK | {"type": "response.create"}, WEATHER_ASKED, resends, with_the_type_last
    ),
    "AI SDK": RecordedClient(
        AI_SDK, AI_SDK_ASKED, resends, by_reference_but_calls, is_websocket=False
    ),
    "AI SDK, not stored": RecordedClient(
        AI_SDK | {"store": False, "include": ["reasoning.encrypted_content"]},
        AI_SDK_ASKED,
        resends,
        rewritten_without_ids,
        is_websocket=False,
    ),
    "AI SDK, WebSocket": RecordedClient(
        AI_SDK, AI_SDK_ASKED, resends, by_reference_but_calls, betas=[CHAINED_BETA]
    ),
    "AI SDK, Open Responses": RecordedClient(
        AI_SDK | {"instructions": "Be brief."},
        [text("user", "Weather in Oslo?")],
        resends,
        rewritten,
        is_websocket=False,
    ),
    "Cline": RecordedClient(
        AI_SDK
        | {
            "include": ["web_search_call.action.sources"],
            "truncation": "auto",
            "tools": [
                {"type": "web_search"},
                {"type": "image_generation", "output_format": "png"},
                TOOL,
            ],
        },
        AI_SDK_ASKED,
        resends,
        without_thoughts,
        is_websocket=False,
    ),
    "opencode, HTTP": RecordedClient(
        OPENCODE, AI_SDK_ASKED, resends, rewritten_without_ids, is_websocket=False
    ),
    "opencode, WebSocket": RecordedClient(
        OPENCODE, AI_SDK_ASKED, resends, rewritten_without_ids, betas=[CHAINED_BETA]
    ),
    "pi, HTTP": RecordedClient(PI, AI_SDK_ASKED, resends, rewritten, is_websocket=False),
    "pi, WebSocket": RecordedClient(
        PI
        | {
            "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content"],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
        AI_SDK_ASKED,
        chains,
        path="/v1/codex/responses",
        betas=[CHAINED_BETA],
    ),
    "llm": RecordedClient(
        {"model": "tiny", "stream": True, "store": False, "tools": [TOOL]},
        WEATHER_ASKED,
        resends,
        as_easy_messages,
        is_websocket=False,
    ),
}
