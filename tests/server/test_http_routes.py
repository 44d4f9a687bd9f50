"""The other routes, and what the router refuses."""

import pytest

from tests.server.models import OSLO
from tests.server.running import BODY, serving, suspended
from tests.server.sockets import Door, knock

REFUSED = [
    ("GET", "/v1/responses", 426, "upgrade_required"),
    ("DELETE", "/v1/responses", 405, None),
    ("PUT", "/v1/responses", 405, None),
    ("GET", "/", 404, None),
    ("GET", "/v1/responses/resp_1", 404, "response_not_found"),
    ("GET", "/v1/codex/responses", 426, "upgrade_required"),
    ("POST", "/v1/chat/completions", 404, None),
    ("POST", "/v1/models", 405, None),
    ("POST", "/health", 405, None),
    ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ("GET", "/v1/models/openai/gpt-9", 404, "model_not_found"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), REFUSED)
async def test_what_is_not_served_is_refused_in_json(
    method: str, path: str, status: int, code: str | None
) -> None:
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.request(method, path)

        error = answer.json()["error"]
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["code"] == code


async def test_a_refused_method_is_told_which_are_allowed() -> None:
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.delete("/v1/responses")

        assert set(answer.headers["allow"].split(", ")) >= {"POST"}


@pytest.mark.parametrize("door", Door)
async def test_a_path_with_nothing_at_it_is_told_and_the_right_one(door: Door) -> None:
    async with serving("Sun.") as server:
        answer = await knock(server.port, door, "/v1/response")

    message = answer.json["error"]["message"]
    assert answer.status == 404
    assert "'/v1/response'" in message
    assert "/v1/responses " in message


async def test_a_missing_upgrade_is_told_to_which_protocol() -> None:
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.get("/v1/responses")

        assert answer.headers["upgrade"] == "websocket"


async def test_the_one_model_is_listed() -> None:
    async with serving("Sun.") as server, server.http() as http:
        models = (await http.get("/v1/models?client_version=0.171.0")).json()

        (model,) = models["data"]
        assert models["object"] == "list"
        assert (model["id"], model["object"]) == ("tiny", "model")
        assert isinstance(model["created"], int)
        assert isinstance(model["owned_by"], str)


async def test_the_model_can_be_looked_up_and_named() -> None:
    async with serving("Sun.") as server, server.http() as http:
        model = (await http.get("/v1/models/tiny")).json()
        response = (await http.post("/v1/responses", json=BODY | {"model": model["id"]})).json()

        assert response["model"] == "tiny"


async def test_the_server_says_that_it_is_well() -> None:
    async with serving("Sun.") as server, server.http() as http:
        answer = await http.get("/health")

        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "model": "tiny"}


async def test_a_request_is_answered_while_a_run_is_suspended_elsewhere() -> None:
    async with suspended(OSLO) as (server, _, _), server.http() as http:
        answer = await http.get("/health")

        assert answer.status_code == 200
