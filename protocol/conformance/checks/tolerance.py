"""Junk that real clients send, and that must not stop a server."""

from protocol.conformance.actions import Scenario
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.rules import Rule, expect
from protocol.conformance.socket_steps import TOOL
from protocol.conformance.steps import streamed

checks = Checks()

_JUNK_TOOLS = [
    TOOL,
    {"type": "web_search"},
    {"type": "namespace", "name": "sky", "description": "Sky", "tools": [TOOL]},
    {"type": "custom", "name": "run", "description": "Run it", "format": {"type": "text"}},
]


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.JUNK_TOLERANCE, requests=1)
def tools_of_other_kinds_are_accepted(target: Target, way: Way) -> Scenario:
    """Hosted, namespaced and custom tools beside a function do not stop a response."""
    events = yield from streamed(target, way, tools=_JUNK_TOOLS, tool_choice="none")

    expect(events[-1]["type"] != "response.failed", "the response failed")


@checks.over(Way.CHAINED, rule=Rule.JUNK_TOLERANCE, requests=1)
def members_of_codex_are_accepted(target: Target, way: Way) -> Scenario:
    """`stream`, `client_metadata` and `include` of a frame do not stop a response."""
    members = {
        "stream": True,
        "client_metadata": {"turn": "1"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "conformance",
    }
    events = yield from streamed(target, way, **members)

    expect(events[-1]["type"] != "response.failed", "the response failed")
