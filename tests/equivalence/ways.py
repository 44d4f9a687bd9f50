"""The ways in which a client holds a dialogue, each over real sockets.

In all of them the client does the same: it says what the user says, makes the calls that come back
and brings their outputs, until there are no more calls. What differs is how it asks.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from sampler.run import Run
from server.settings import Settings
from tests.equivalence.dialogues import INSTRUCTIONS, TOOLS, Dialogue
from tests.equivalence.models import RecordingEngine, Subject
from tests.equivalence.reference import Reference
from tests.server.http_client import post
from tests.server.running import CLOSING, Event, Running, calls_in, serving

STATELESS = Settings(recent_responses=0, store=False, ledger=False)
"""Nothing is known of earlier requests over HTTP: a history is encoded and prefilled again."""
KEEPING = Settings(recent_responses=8, store=False, ledger=False)


class Stage:
    """Where one dialogue is held."""

    def __init__(self, subject: Subject, dialogue: Dialogue, folder: Path) -> None:
        """Hold ``dialogue`` with ``subject``; what is stored goes into ``folder``."""
        self.subject = subject
        self.dialogue = dialogue
        self.folder = folder
        self.members: Event = {
            "instructions": INSTRUCTIONS,
            "tools": TOOLS,
            "parallel_tool_calls": dialogue.is_parallel,
            "max_output_tokens": dialogue.max_output_tokens,
            "temperature": dialogue.temperature,
            "seed": dialogue.seed,
        }
        """What every request has to say."""
        self._engines: list[RecordingEngine] = []
        self._server: Running | None = None
        subject.recorder.logits.clear()

    @property
    def reference(self) -> Reference:
        """What the dialogue comes to if nothing ever interrupts it."""
        return self.subject.reference(self.dialogue)

    @asynccontextmanager
    async def serving(self, settings: Settings = STATELESS) -> AsyncIterator[Running]:
        """Run a server of its own, which knows of earlier ones only what was stored."""
        engine = self.subject.engine()
        self._engines.append(engine)
        async with serving(engine=engine, settings=settings) as self._server:
            yield self._server
        self._server = None

    async def interfere(self) -> None:
        """Have the server that runs, if one does, sample something else."""
        if self._server is not None:
            await post(
                self._server,
                input="Tell me a story.",
                tools=[],
                temperature=0,
                max_output_tokens=3,
            )

    def run_of(self, response: Event) -> Run:
        """Return the run behind a response, over or not."""
        runs = (run for engine in self._engines for run in engine.all_runs)
        return next(run for run in runs if run.id == response["id"])

    def logits_after(self, token_ids: tuple[int, ...]) -> Tensor:
        """Return what a server's model gave when it had read ``token_ids``, ``(vocab,)``."""
        return self.subject.recorder.logits[token_ids]


@dataclass(frozen=True)
class Answer:
    """What comes back, up to where the client is to act."""

    items: Sequence[Event]
    """What the model said."""
    response: Event | None
    """As the closing event has it; None where nothing is closed."""


def answer_of(events: Sequence[Event]) -> Answer:
    """Return what ``events`` say."""
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    is_closed = events[-1]["type"] in CLOSING
    return Answer(items, events[-1]["response"] if is_closed else None)


Ask: TypeAlias = Callable[[Sequence[Event], str], Awaitable[Answer]]
"""Brings what is new, and says whether the model must call (the tool choice)."""
Way: TypeAlias = Callable[[Stage], AbstractAsyncContextManager[Ask]]


# --- One response for all rounds -----------------------------------------------------------------


@asynccontextmanager
async def suspended(stage: Stage) -> AsyncIterator[Ask]:
    """Append the outputs one by one. What the user says next is appended too."""
    async with stage.serving() as server, server.connect("append") as client:

        async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
            if not client.streams:
                return answer_of(
                    await client.create(**stage.members, input=items, tool_choice=tool_choice)
                )
            for item in items:
                await client.send("response.append", input=[item], tool_choice=tool_choice)
            return answer_of(await client.segment())

        yield ask


@asynccontextmanager
async def injected(stage: Stage) -> AsyncIterator[Ask]:
    """Inject each output when its call is there, maybe before the turn is over."""
    async with stage.serving() as server, server.connect("inject") as client:

        async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
            if items[0]["type"] == "message":
                parent = client.streams[-1][-1]["response"]["id"] if client.streams else None
                body = {"input": items, "tool_choice": tool_choice, "previous_response_id": parent}
                await client.send("response.create", **stage.members, **body)
            else:
                assert tool_choice == "auto", "an inject has no tool choice"
                response_id = client.streams[-1][0]["response"]["id"]
                for item in items:
                    await client.send("response.inject", response_id=response_id, input=[item])
            events = [await client.receive()]
            while not (whole(calls_in(events)) or events[-1]["type"] in CLOSING):
                events.append(await client.receive())
            return answer_of(events)

        yield ask


# --- One response for each round -----------------------------------------------------------------


@asynccontextmanager
async def chained(stage: Stage) -> AsyncIterator[Ask]:
    """Follow the response before, by its id, on one connection."""
    async with stage.serving() as server, server.connect() as client:
        parent_id: str | None = None

        async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
            nonlocal parent_id
            body = {"input": items, "tool_choice": tool_choice, "previous_response_id": parent_id}
            events = await client.create(**stage.members, **body)
            parent_id = events[-1]["response"]["id"]
            return answer_of(events)

        yield ask


@asynccontextmanager
async def appended_after_completed(stage: Stage) -> AsyncIterator[Ask]:
    """Append to a response that is complete, as Codex did up to 0.98: after its own items."""
    async with stage.serving() as server, server.connect() as client:
        said: Sequence[Event] = ()

        async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
            nonlocal said
            if client.streams:
                echo = map(without_id, said)
                events = await client.append(*echo, *items, tool_choice=tool_choice)
            else:
                events = await client.create(**stage.members, input=items, tool_choice=tool_choice)
            said = whole(answer_of(events).items)
            return answer_of(events)

        yield ask


@asynccontextmanager
async def resent(stage: Stage) -> AsyncIterator[Ask]:
    """Send all again on one connection, without ids, and with arguments spelled in another way."""
    async with stage.serving() as server, server.connect() as client:
        history: list[Event] = []

        async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
            history.extend(items)
            answer = answer_of(
                await client.create(**stage.members, input=history, tool_choice=tool_choice)
            )
            history.extend(without_id(rewritten(item)) for item in whole(answer.items))
            return answer

        yield ask


@asynccontextmanager
async def resent_over_http(stage: Stage) -> AsyncIterator[Ask]:
    """Send all again in a request, as it came."""
    async with stage.serving(KEEPING) as server:
        history: list[Event] = []

        async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
            history.extend(items)
            response = await post(server, **stage.members, input=history, tool_choice=tool_choice)
            history.extend(whole(response["output"]))
            return Answer(response["output"], response)

        yield ask


@asynccontextmanager
async def stored(stage: Stage) -> AsyncIterator[Ask]:
    """Follow the response before, by its id, in a request to a server that was started since."""
    settings = Settings(recent_responses=0, data_dir=stage.folder)
    parent_id: str | None = None

    async def ask(items: Sequence[Event], tool_choice: str) -> Answer:
        nonlocal parent_id
        body: Event = {
            "input": items,
            "tool_choice": tool_choice,
            "previous_response_id": parent_id,
        }
        async with stage.serving(settings) as server:
            response = await post(server, **stage.members, **body)
        parent_id = response["id"]
        return Answer(response["output"], response)

    yield ask


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (suspended, injected, chained, appended_after_completed, resent, stored)
}
"""Each but ``resent_over_http``, which is compared with what a server does that keeps nothing."""


# --- Items ---------------------------------------------------------------------------------------


def message(text: str) -> Event:
    """Return what the user says."""
    return {"type": "message", "role": "user", "content": text}


def whole(items: Sequence[Event]) -> list[Event]:
    """Return ``items`` without a call that was cut short: it never was one."""
    return [
        item for item in items if item["type"] != "function_call" or item["status"] == "completed"
    ]


def without_id(item: Event) -> Event:
    """Return ``item`` as Codex repeats it."""
    return {key: value for key, value in item.items() if key not in ("id", "status")}


def rewritten(item: Event) -> Event:
    """Return ``item`` with arguments spelled in another way."""
    if item["type"] != "function_call":
        return item
    return item | {"arguments": json.dumps(json.loads(item["arguments"]), separators=(",", ":"))}
