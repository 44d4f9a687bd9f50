"""What the operator may choose, and what is said about it."""

from pathlib import Path
from typing import Any

import pytest

from server.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"store": False, "ledger": False, "data_dir": Path("data")}, "data directory"),
        ({"max_connections": 2, "max_connections_per_key": 3}, "more connections"),
        ({"allowed_origins": ("app.example",)}, "'app.example'"),
        ({"allowed_origins": ("https://app.example/",)}, "'https://app.example/'"),
        ({"allowed_origins": ("https://App.example",)}, "lower case"),
        ({"allowed_origins": ("*", "https://*.example/x")}, "'https://*.example/x'"),
        ({"allowed_hosts": ("",)}, "''"),
        ({"allowed_hosts": ("http://box.home",)}, "'http://box.home'"),
        ({"allowed_hosts": ("box.home:8000",)}, "'box.home:8000'"),
    ],
)
def test_choices_that_make_no_sense_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings(**choices)

    assert message in str(refused.value)


@pytest.mark.parametrize(
    "choices",
    [
        {"allowed_origins": ("https://app.example", "http://[::1]:3000", "null", "*")},
        {"allowed_origins": ("vscode-webview://abc", "chrome-extension://abc")},
        {"allowed_hosts": ("box.home", "[fd00::1]", "fd00::1")},
        {"max_connections": None, "max_connections_per_key": 3},
        {"store": False},
    ],
)
def test_choices_that_make_sense_are_taken(choices: dict[str, Any]) -> None:
    settings = Settings(**choices)

    assert {name: getattr(settings, name) for name in choices} == choices


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_is_no_reason_to_warn(host: str) -> None:
    assert list(Settings(host=host).warnings()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.home"])
def test_an_address_within_reach_of_others_is_warned_of_unless_keys_are_asked_for(
    host: str,
) -> None:
    (warning,) = Settings(host=host).warnings()

    assert f"listening on {host} without API keys" in warning
    assert list(Settings(host=host, api_key_file=Path("keys")).warnings()) == []


def test_letting_all_web_pages_in_is_warned_of_unless_keys_are_asked_for() -> None:
    (warning,) = Settings(allowed_origins=("*",)).warnings()

    assert "any web page" in warning
    assert list(Settings(allowed_origins=("*",), api_key_file=Path("keys")).warnings()) == []
