"""The checks of Open Responses agree with its types, and with its suite on what is no fault."""

import pytest
from openresponses_types import ResponseResource
from pydantic import ValidationError

from protocol import errors
from protocol.codec import encode
from protocol.conformance.actions import Answer, Request
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check
from protocol.conformance.play import Result
from protocol.conformance.shapes import OPEN_RESPONSE, Event
from tests.protocol.conformance.model_server import ModelServer, Run
from tests.protocol.conformance.playing import played


def check(name: str) -> Check:
    (found,) = chosen(CHECKS, patterns=[name])
    return found


class Telling(ModelServer):
    """Tells a response with some members in place of its own."""

    def __init__(self, **members: object) -> None:
        super().__init__()
        self.members = members
        self.told: Event = {}

    def resource(self, response: Event) -> Event:
        self.told = response | self.members
        return self.told


class Without(Telling):
    """Tells a response without a member."""

    def resource(self, response: Event) -> Event:
        self.told = {name: value for name, value in response.items() if name not in self.members}
        return self.told


def is_right(told: Event) -> bool:
    """Tell what the types of Open Responses say."""
    try:
        ResponseResource.model_validate_json(encode(told), strict=True)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("member", sorted(OPEN_RESPONSE))
@pytest.mark.parametrize("kind", [Telling, Without], ids=["null", "absent"])
def test_members_are_null_or_absent_where_the_types_allow_it(
    member: str, kind: type[Telling]
) -> None:
    server = kind(**{member: None})

    verdict = played(check("basic-response"), server)

    if member in ("completed_at", "usage") and kind is Telling:
        return  # a completed response has them, whatever its type allows
    assert (verdict.result is Result.PASSED) is is_right(server.told), verdict.message


@pytest.mark.parametrize(
    "members",
    [
        {"text": {}},
        {"reasoning": {"effort": None}},
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": "none"},
        {"tools": [{"type": "function", "name": "f", "description": None, "parameters": None}]},
        {
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "description": None,
                    "parameters": None,
                    "strict": None,
                }
            ]
        },
        {"temperature": "warm"},
        {"store": "no"},
        {"created_at": "now"},
    ],
)
def test_members_are_of_the_types(members: Event) -> None:
    server = Telling(**members)

    verdict = played(check("basic-response"), server)

    assert (verdict.result is Result.PASSED) is is_right(server.told), verdict.message


# --- What is no fault ----------------------------------------------------------------------------


class CompactsNothing(ModelServer):
    def route(self, request: Request) -> Answer:
        if request.path == "/responses/compact":
            return Answer(404, {}, b'{"detail": "Not Found"}')
        return super().route(request)


class ReadsTextOnly(ModelServer):
    def seen(self, body: Event) -> Event:
        return body


class HasMuchToSay(ModelServer):
    def words(self, run: Run) -> list[str]:
        return ["and"] * 1000


class KeepsNoConversations(ModelServer):
    def compact(self, body: bytes) -> Answer:
        raise errors.unsupported_parameter("input", "conversations are not compacted")


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("compact-response", CompactsNothing()),
        ("compact-missing-model", CompactsNothing()),
        ("websocket-compact-new-chain", CompactsNothing()),
        ("compact-response", KeepsNoConversations()),
        ("image-input", ReadsTextOnly()),
        ("basic-response", HasMuchToSay()),
        ("websocket-response", HasMuchToSay()),
    ],
)
def test_what_a_server_does_not_do_is_no_fault(name: str, server: ModelServer) -> None:
    verdict = played(check(name), server)

    assert verdict.result is Result.NOT_SUPPORTED, verdict
    assert verdict.message
