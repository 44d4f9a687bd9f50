from typing import Any

import pytest
from openresponses_types import ResponseResource

from protocol.client_events import parse_create
from protocol.codec import decode_object, encode
from protocol.response import Usage, build_response
from tests.protocol.streams import BODY, new_response


def on_the_wire(**members: Any) -> dict[str, Any]:
    return decode_object(encode(new_response(**members)))


def test_a_resource_has_the_31_members_of_open_responses_and_user() -> None:
    members = ResponseResource.model_fields.keys()

    assert len(members) == 31
    assert on_the_wire().keys() == members | {"user"}


def test_a_new_response_is_in_progress_and_empty() -> None:
    wire = on_the_wire()

    assert (wire["object"], wire["id"], wire["created_at"]) == ("response", "resp_1", 1)
    assert (wire["status"], wire["output"], wire["usage"]) == ("in_progress", [], None)


def test_values_that_were_not_given_are_echoed_as_their_defaults() -> None:
    wire = on_the_wire()

    assert (wire["temperature"], wire["top_p"], wire["top_logprobs"]) == (1.0, 1.0, 0)
    assert (wire["presence_penalty"], wire["frequency_penalty"]) == (0.0, 0.0)
    assert (wire["truncation"], wire["service_tier"]) == ("disabled", "default")
    assert (wire["text"], wire["reasoning"]) == ({"format": {"type": "text"}}, None)
    assert (wire["tool_choice"], wire["metadata"]) == ("auto", {})


@pytest.mark.parametrize(
    "members",
    [
        {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 7, "max_tool_calls": 2},
        {"instructions": "Be brief.", "metadata": {"k": "v"}, "truncation": "auto"},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "p"},
        {"presence_penalty": 1.0, "frequency_penalty": -1.0, "parallel_tool_calls": False},
        {"reasoning": {"effort": "low", "summary": None}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_object"}}},
        {
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "city",
                    "description": None,
                    "schema": {"type": "object"},
                    "strict": True,
                }
            }
        },
        {"previous_response_id": "resp_0", "top_logprobs": 3},
        {"tool_choice": {"type": "function", "name": "weather"}},
    ],
)
def test_values_that_were_given_are_echoed(members: dict[str, Any]) -> None:
    wire = on_the_wire(**members)

    assert {name: wire[name] for name in members} == members


@pytest.mark.parametrize("store", [True, False])
def test_storage_and_service_tier_are_echoed_as_they_are_not_as_they_were_wished(
    store: bool,
) -> None:
    response = build_response(
        parse_create(BODY | {"store": not store, "service_tier": "priority"}, transport="http"),
        id="resp_1",
        created_at=1,
        store=store,
    )

    assert (response.store, response.service_tier) == (store, "default")


def test_a_background_response_says_so() -> None:
    params = parse_create(BODY | {"background": True}, transport="http")

    assert build_response(params, id="resp_1", created_at=1, store=True).background


def test_tools_are_echoed_in_order() -> None:
    search = {"type": "web_search"}

    assert [tool["type"] for tool in on_the_wire(tools=[search, *BODY["tools"]])["tools"]] == [
        "web_search",
        "function",
    ]


def test_usage_has_its_total_and_its_details() -> None:
    usage = Usage.of(10, 4, cached_tokens=8, cache_write_tokens=1, reasoning_tokens=2)

    assert decode_object(encode(usage)) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 1},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def test_the_usage_of_several_segments_is_their_sum() -> None:
    first = Usage.of(10, 4, cached_tokens=8, cache_write_tokens=1, reasoning_tokens=2)
    second = Usage.of(20, 3, cached_tokens=14, reasoning_tokens=1)

    assert Usage.sum(iter([first, second])) == Usage.of(
        30, 7, cached_tokens=22, cache_write_tokens=1, reasoning_tokens=3
    )
    assert Usage.sum([]) == Usage.of(0, 0)
