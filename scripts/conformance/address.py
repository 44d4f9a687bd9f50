"""Where a server is, and how its doors are named."""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCHEMES = {"http": "ws", "https": "wss"}
_ALIASES = {"ws": "http", "wss": "https"}


@dataclass(frozen=True)
class Address:
    """The base URL of a server's API, and what each request to it carries."""

    url: str
    """Without a slash at its end; ``/responses`` follows."""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def socket_url(self) -> str:
        """The same for WebSockets."""
        scheme, _, rest = self.url.partition("://")
        return f"{_SCHEMES[scheme]}://{rest}"

    @property
    def proxy(self) -> Literal[True] | None:
        """What runs on this machine is not behind a proxy, whatever the environment says."""
        return None if urlsplit(self.url).hostname in _LOOPBACK else True


def address_of(url: str, api_key: str | None = None) -> Address:
    """Return the address that a person means by ``url``: one without a path is of ``/v1``.

    Args:
        url: of the server or of its API, for HTTP or WebSocket.
        api_key: sent as a bearer token.

    Raises:
        ValueError: it is no such URL, or no header can have the key.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # only now is it read
    except ValueError:
        raise _no_url(url) from None
    scheme = _ALIASES.get(parts.scheme, parts.scheme)
    if scheme not in _SCHEMES or not parts.hostname or parts.query:
        raise _no_url(url)
    path = parts.path.rstrip("/").removesuffix("/responses") or "/v1"
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise ValueError("expected an API key of visible ASCII characters")
    headers = () if api_key is None else (("Authorization", f"Bearer {api_key}"),)
    return Address(f"{scheme}://{parts.netloc}{path}", headers)


def _no_url(url: str) -> ValueError:
    return ValueError(f"expected a URL like http://127.0.0.1:8000/v1, got {url!r}")
