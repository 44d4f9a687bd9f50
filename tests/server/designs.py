"""One agent run, held in each of the ways in which clients can hold it.

What the model says is the model's business; each of its calls is answered with the same output.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from protocol.codec import decode_object
from tests.server.running import BODY, TERMINAL, Event, Running, calls_in, output

QUESTION: Event = {"role": "user", "content": BODY["input"]}
ANSWER = "dry"


class Design(Enum):
    """How a client goes on after a tool call."""

    APPEND = "append"
    INJECT = "inject"
    CHAINED = "chained"
    CACHED = "stateless+cache"
    STATELESS = "stateless"


SUSPENDED = (Design.APPEND, Design.INJECT)
"""Those in which the whole run is one response."""


async def hold(
    server: Running, design: Design, *, headers: Sequence[tuple[str, str]] = (), **members: Any
) -> list[Event]:
    """Hold a run to its end and return its responses, each as its closing event has it.

    Args:
        server: where.
        design: how.
        headers: of each connection or request.
        members: of each create, besides its input.
    """
    match design:
        case Design.APPEND:
            return await _append(server, headers, members)
        case Design.INJECT:
            return await _inject(server, headers, members)
        case Design.CHAINED:
            return await _chain(server, headers, members)
        case Design.CACHED:
            return await _resend(server, "", headers, members)
        case Design.STATELESS:
            return await _resend(server, "?cache=off", headers, members)


async def post(
    server: Running,
    query: str = "",
    *,
    headers: Sequence[tuple[str, str]] = (),
    **members: Any,
) -> Event:
    """Return the response to a request."""
    async with server.http() as http:
        answer = await http.post(
            f"/v1/responses{query}", json=BODY | members, headers=dict(headers)
        )
    assert answer.status_code == 200, answer.text
    return decode_object(answer.content)


async def _append(
    server: Running, headers: Sequence[tuple[str, str]], members: Event
) -> list[Event]:
    async with server.connect("append", headers=headers) as client:
        events = await client.create(**(members | {"input": [QUESTION]}))
        responses = [events[-1]["response"]]
        while calls := calls_in(events):
            events = await client.append(*(output(call, ANSWER) for call in calls))
            responses.append(events[-1]["response"])
    return responses


async def _inject(
    server: Running, headers: Sequence[tuple[str, str]], members: Event
) -> list[Event]:
    async with server.connect("inject", headers=headers) as client:
        await client.send("response.create", **(BODY | members | {"input": [QUESTION]}))
        while (event := await client.receive())["type"] not in TERMINAL:
            for call in calls_in([event]):
                response_id = client.streams[-1][0]["response"]["id"]
                await client.send(
                    "response.inject", response_id=response_id, input=[output(call, ANSWER)]
                )
    return [event["response"]]


async def _chain(
    server: Running, headers: Sequence[tuple[str, str]], members: Event
) -> list[Event]:
    async with server.connect(headers=headers) as client:
        events = await client.create(**(members | {"input": [QUESTION]}))
        responses = [events[-1]["response"]]
        while calls := calls_in(events):
            items = [output(call, ANSWER) for call in calls]
            asked = {"previous_response_id": responses[-1]["id"], "input": items}
            events = await client.create(**(members | asked))
            responses.append(events[-1]["response"])
    return responses


async def _resend(
    server: Running, query: str, headers: Sequence[tuple[str, str]], members: Event
) -> list[Event]:
    history = [QUESTION]
    responses: list[Event] = []
    while not responses or calls_of(responses[-1]):
        asked = members | {"input": history}
        responses.append(await post(server, query, headers=headers, **asked))
        outputs = [output(call, ANSWER) for call in calls_of(responses[-1])]
        history = [*history, *responses[-1]["output"], *outputs]
    return responses


def calls_of(response: Event) -> list[Event]:
    """Return the calls in ``response``."""
    return [item for item in response["output"] if item["type"].endswith("_call")]
