"""The fake endpoint in a process of its own, saying what traces say.

Where the server samples, it has its model say a trace again (``sampler.replay``). At an endpoint
only the endpoint can do that, and this one does. A request is an agent run that begins as one of
the traces does, the number before its first message aside (``scripts.comparison.trials``), and
after as many messages of the assistant, the turn that comes next is said. What the tools answered
is the client's business. It says nothing else: any other conversation is refused.

    python -m tests.sampler.engines.replaying_endpoint --traces FILE --rate 2000

Its URL is all that it prints. It goes on until SIGTERM or Ctrl-C, or until the process that started
it is gone. It lets any key in.
"""

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from protocol.codec import decode_object
from protocol.items import parse_items
from protocol.validation import JsonObject
from sampler.engines.chat.dialect import OPENAI_CHAT
from sampler.engines.chat.messages import messages_of
from sampler.engines.chat.tools import arguments_of, sent_name
from sampler.traces import Trace, TraceTurn, read_traces
from scripts.comparison.trials import unnumbered
from tests.sampler.engines.fake_endpoint import Script, calls, fake_endpoint, refuses, says

_LOOK_SECONDS = 0.5
"""How often it is looked whether the parent is there."""


class Replaying:
    """Finds what comes next in a conversation."""

    def __init__(self, traces: Iterable[Trace]) -> None:
        """Know ``traces``, which begin differently."""
        self._traces = [(_opening(trace), trace) for trace in traces]

    def script(self, body: JsonObject) -> Script:
        """Return what is said to a request with ``body``."""
        messages = _without_number(body.get("messages") or [])
        for opening, trace in self._traces:
            if messages[: len(opening)] == opening:
                return _turn(trace, messages[len(opening) :])
        return refuses(400, "no trace begins like this", code="unknown_conversation")


def _opening(trace: Trace) -> list[JsonObject]:
    """Return the messages that a run of ``trace`` begins with."""
    content = trace.input if isinstance(trace.input, str) else list(trace.input)
    messages = messages_of(parse_items(content), trace.instructions, OPENAI_CHAT)
    return _without_number(list(map(decode_object, messages)))


def _without_number(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return ``messages`` without the number before what the user says first."""
    found = list(messages)
    for index, message in enumerate(found):
        if message["role"] == "user" and isinstance(message["content"], str):
            found[index] = message | {"content": unnumbered(message["content"])}
            break
    return found


def _turn(trace: Trace, messages: Iterable[JsonObject]) -> Script:
    """Return the turn of ``trace`` that follows on ``messages``."""
    number = sum(message["role"] == "assistant" for message in messages)
    if number < len(trace.turns):
        return _said(trace.turns[number])
    return refuses(400, f"{trace.name!r} has no turn {number}", code="unknown_conversation")


def _said(turn: TraceTurn) -> Script:
    made = [(sent_name(call.qualified_name), arguments_of(call)) for call in turn.call_items()]
    return [*says(turn.text), *calls(*made)]


# --- The process ---------------------------------------------------------------------------------


async def serve(traces: Sequence[Trace], rate: float, prefill_rate: float, port: int) -> None:
    """Serve ``traces`` until a signal comes or the parent is gone."""
    parent = os.getppid()
    is_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, is_to_stop.set)
    async with fake_endpoint(port=port) as fake:
        fake.checks_key = False
        fake.tokens_per_second = rate or None
        fake.prefill_tokens_per_second = prefill_rate or None
        fake.answer = Replaying(traces).script
        typer.echo(fake.url)
        while not is_to_stop.is_set() and os.getppid() == parent:
            with suppress(TimeoutError):
                await asyncio.wait_for(is_to_stop.wait(), _LOOK_SECONDS)


def main(
    traces: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="What it may say.")],
    rate: Annotated[
        float, typer.Option(min=0, help="Tokens it says a second; 0 is as fast as can be.")
    ] = 2000.0,
    prefill_rate: Annotated[
        float, typer.Option(min=0, help="Uncached tokens it reads a second; 0 likewise.")
    ] = 40_000.0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
) -> None:
    """Serve a chat-completions endpoint that says what traces say."""
    asyncio.run(serve(read_traces(traces), rate, prefill_rate, port))


if __name__ == "__main__":
    typer.run(main)
