"""Faults in what an event holds."""

from protocol.conformance.actions import Action, Frame, Outcome
from protocol.conformance.rules import Rule
from tests.protocol.conformance.faults.fault import Faults, after, without
from tests.protocol.conformance.model_server import ModelServer

faults = Faults()

TEXT = "text-is-told-in-order"
CALL = "call-is-told-in-order"

faults.telling(
    "deltas without logprobs", Rule.EVENT_MEMBERS, TEXT, without("output_text.delta", "logprobs")
)
faults.telling(
    "an item without status", Rule.ITEM_MEMBERS, TEXT, without("output_item.done", "item", "status")
)
faults.telling(
    "a call without call_id",
    Rule.ITEM_MEMBERS,
    CALL,
    without("output_item.done", "item", "call_id"),
)
faults.telling(
    "text without annotations",
    Rule.ITEM_MEMBERS,
    TEXT,
    without("content_part.done", "part", "annotations"),
)
faults.telling(
    "a response without tools", Rule.RESPONSE_MEMBERS, TEXT, without("created", "response", "tools")
)
faults.telling(
    "an event of its own",
    Rule.KNOWN_EVENT,
    TEXT,
    after("in_progress", {"type": "response.telemetry"}),
)


@faults.doing(Rule.FRAME_IS_JSON, f"chained/{TEXT}")
class BinaryFrames(ModelServer):
    """Events come in binary frames."""

    def perform(self, action: Action) -> Outcome:
        came = super().perform(action)
        if isinstance(came, Frame) and isinstance(came.data, str):
            return Frame(came.data.encode())
        return came


@faults.doing(Rule.FRAME_IS_JSON, f"chained/{TEXT}")
class FramesOfTwo(ModelServer):
    """Two objects in one frame."""

    def perform(self, action: Action) -> Outcome:
        came = super().perform(action)
        if isinstance(came, Frame) and isinstance(came.data, str):
            return Frame(came.data + came.data)
        return came
