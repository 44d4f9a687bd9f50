"""URLs that people type, and where they lead."""

import pytest

from scripts.conformance.address import address_of


@pytest.mark.parametrize(
    ("url", "http", "socket"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "ws://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "ws://127.0.0.1:8000/v1"),
        ("https://a.test/openai/v1/", "https://a.test/openai/v1", "wss://a.test/openai/v1"),
        ("ws://a.test/v1/responses", "http://a.test/v1", "ws://a.test/v1"),
        ("wss://a.test", "https://a.test/v1", "wss://a.test/v1"),
    ],
)
def test_a_url_leads_to_both_doors(url: str, http: str, socket: str) -> None:
    address = address_of(url)

    assert (address.url, address.socket_url) == (http, socket)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://a.test",
        "http://",
        "http://:8000/v1",
        "http://a:b/v1",
        "http://a.test/v1?version=1",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL"):
        address_of(url)


def test_a_key_is_sent_as_a_bearer_token() -> None:
    assert address_of("http://a.test", "x").headers == (("Authorization", "Bearer x"),)
    assert address_of("http://a.test").headers == ()


@pytest.mark.parametrize("key", ["", "sk-a\n", "sk-a\r\nX: y", "schlüssel", "a b"])
def test_a_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"^expected an API key of visible ASCII characters$"):
        address_of("http://a.test", key)


def test_this_machine_is_not_behind_a_proxy() -> None:
    assert address_of("http://localhost:8000").proxy is None
    assert address_of("http://a.test").proxy is True
