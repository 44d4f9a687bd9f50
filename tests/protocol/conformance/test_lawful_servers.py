"""Servers that do less than most, and break no rule by it: no check fails them."""

from typing import Any

import pytest

from protocol import errors
from protocol.client_events import CreateParams
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check
from protocol.conformance.play import Result
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from tests.protocol.conformance.faults.refusing import FailsAtImages
from tests.protocol.conformance.model_server import ModelServer, Run
from tests.protocol.conformance.playing import played


class IgnoresLanes(ModelServer):
    """Has one lane, and so keeps one response of a connection, the latest."""

    def lane_name(self, frame: Event) -> str | None:
        return None

    def error_frame(self, error: ProtocolError, lane: str | None) -> Event:
        return super().error_frame(error, None)


class RefusesLanes(IgnoresLanes):
    def lane_name(self, frame: Event) -> str | None:
        if "stream_id" in frame:
            raise errors.unknown_parameter("stream_id")
        return None


class KeepsAllSteers(ModelServer):
    def check_steers(self, run: Run | None) -> None:
        pass


class OverlooksImages(ModelServer):
    def seen_item(self, item: Any) -> Any:
        match item:
            case {"content": [*parts]}:
                texts = [part for part in parts if part["type"] != "input_image"]
                return item | {"content": texts}
            case _:
                return item


class CallsImagesUnsupported(ModelServer):
    def check_image(self, url: str) -> None:
        try:
            super().check_image(url)
        except ProtocolError:
            code = "unsupported_image_media_type"
            raise ProtocolError("unsupported image media type", code=code) from None


class FailsResponsesToImages(FailsAtImages):
    code = "invalid_image"


class AllowsNoTinyLimits(ModelServer):
    def parse(self, body: Event, transport: Any) -> CreateParams:
        params = super().parse(body, transport)
        if params.max_output_tokens is not None and params.max_output_tokens < 16:
            raise errors.invalid_value("max_output_tokens", "expected at least 16")
        return params


NEEDS_LANES = {
    "chained/warm-up-is-a-parent-twice",
    "chained/one-lane-too-many-is-refused",
    "chained/wrong-names-are-refused",
    "chained/longest-name-is-taken",
    "chained/lanes-are-told-apart",
    "chained/lanes-do-not-wait",
    "chained/seventeenth-create-waits",
    "chained/errors-name-their-lane",
    "chained/failing-fork-evicts-nothing",
    "chained/failure-leaves-other-lanes-alone",
    "chained/fork-keeps-its-parent",
    "chained/steer-stays-on-its-lane",
    "inject/inject-stays-on-its-lane",
}


@pytest.mark.parametrize("server", [IgnoresLanes, RefusesLanes])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_server_needs_no_lanes(check: Check, server: type[ModelServer]) -> None:
    verdict = played(check, server())

    needs_lanes = check.name in NEEDS_LANES
    assert verdict.result is (Result.NOT_SUPPORTED if needs_lanes else Result.PASSED), verdict


@pytest.mark.parametrize(
    ("name", "server", "result"),
    [
        ("chained/one-steer-too-many-comes-back", KeepsAllSteers(), Result.NOT_SUPPORTED),
        ("http/broken-image-is-refused", OverlooksImages(), Result.NOT_SUPPORTED),
        ("http/broken-image-is-refused", CallsImagesUnsupported(), Result.PASSED),
        ("http/broken-image-is-refused", FailsResponsesToImages(), Result.PASSED),
        ("chained/tiny-responses-are-continued", AllowsNoTinyLimits(), Result.NOT_SUPPORTED),
        ("chained/tiny-limits-are-kept", AllowsNoTinyLimits(), Result.NOT_SUPPORTED),
        ("http/tiny-limits-are-kept", AllowsNoTinyLimits(), Result.NOT_SUPPORTED),
    ],
)
def test_what_may_be_otherwise_does_not_fail(
    name: str, server: ModelServer, result: Result
) -> None:
    (check,) = chosen(CHECKS, patterns=[name])

    verdict = played(check, server)

    assert verdict.result is result, verdict
