"""Who may come in: by the name they call, the web page they come from, their key, their number.

A server on a loopback address is within reach of each web page that its user opens. The browser
says where a page comes from, in ``Origin``; and a page whose name was made to resolve to 127.0.0.1
(DNS rebinding) gives itself away by its ``Host``. Both are checked, keys or no keys.

Browsers cannot send an API key with a WebSocket. There is no other way in for them: a key in a
subprotocol or a query would end up in logs.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol import errors
from protocol.errors import ProtocolError
from server.error_response import error_response
from server.settings import Settings
from server.work import Stage, Tallies, Work

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LINE = re.compile(rf"({_NAME.pattern})\s+([0-9A-Fa-f]{{64}})")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d*)?")

_OPEN_PATHS = ("/health",)
"""What needs no key: whether the server lives is asked by what starts it again."""


class ApiKeyFileError(ValueError):
    """A file of API keys that cannot be used. The message says where, and quotes nothing."""


class ApiKeys:
    """The keys that are let in, each by its hash, with the name of who holds it.

    Keys are drawn at random with 256 bits, so nobody finds one by trying, and a plain SHA-256
    keeps them as well as a slow hash would: slowness only protects what people choose.
    """

    def __init__(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take pairs of a name and the SHA-256 of a key in hex. A name may have several keys, so
        that one can take the place of another."""
        self._entries = tuple(entries)

    @classmethod
    def from_file(cls, path: Path) -> "ApiKeys":
        """Read lines of ``NAME HASH``; empty ones and those that begin with ``#`` are skipped.

        Raises:
            ApiKeyFileError: there is no such file, it holds no key, or a line is not one.
        """
        entries = _entries(path)
        if not entries:
            raise ApiKeyFileError(f"{path} holds no API key; scripts/api-key adds one")
        return cls(entries)

    def authenticate(self, authorization: str | None) -> str | None:
        """Return the name of the key that a header brings, or None if it brings none we know."""
        scheme, _, key = (authorization or "").partition(" ")
        key_hash = _hash(key.strip())
        # Compares with all, each in the same time: how long it takes says nothing.
        names = [name for name, known in self._entries if hmac.compare_digest(known, key_hash)]
        return names[0] if names and scheme.lower() == "bearer" else None


def num_api_keys(path: Path, name: str) -> int:
    """Return how many keys ``name`` has in a file, which need not be there yet.

    Raises:
        ApiKeyFileError: the file cannot be used.
    """
    if not path.exists():
        return 0
    return sum(its_name == name for its_name, _ in _entries(path))


def add_api_key(path: Path, name: str) -> str:
    """Add a new key to a file, which is made if need be, and return it: it is kept nowhere.

    Raises:
        ApiKeyFileError: the name cannot be one, or the file cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise ApiKeyFileError("expected a name of 1 to 64 letters, digits, '.', '_' or '-'")
    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        # A file that is there keeps its mode.
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "r+", encoding="utf-8") as file:
            text = file.read()
            end_of_line = "\n" if text and not text.endswith("\n") else ""
            file.write(f"{end_of_line}{name} {_hash(key)}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeyFileError(f"cannot add a key to {path}: {_reason(error)}") from error
    return key


def _entries(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeyFileError(f"cannot read {path}: {_reason(error)}") from error
    return [
        _parse_line(line.strip(), f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]


def _parse_line(line: str, place: str) -> tuple[str, str]:
    if (found := _LINE.fullmatch(line)) is None:
        raise ApiKeyFileError(f"{place}: expected a name and the SHA-256 of a key in hex")
    return found[1], found[2].lower()


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "" if isinstance(error, OSError) else "it is not a text file"


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Access:
    """Middleware around the whole application: refuses in the API's own words, or lets in.

    The name of the key is ``key_id`` in the state of the scope; None where none is asked for. What
    it took to find it is ``admission``, a ``Work``.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | None, settings: Settings, stages: Tallies | None = None
    ) -> None:
        self._app = app
        self._stages = stages or Tallies()
        self._keys = keys
        self._settings = settings
        self._hosts = _own_hosts(settings)
        self._connections: Counter[str | None] = Counter()
        self._for_browsers = CORSMiddleware(
            self._enter,
            allow_origins=settings.allowed_origins,
            allow_methods=("DELETE", "GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # a page that may use the server may find it at home
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            host = headers.get("host", "")
            self._check_host(host)
            self._check_origin(headers.get("origin"), host)
        except ProtocolError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._for_browsers(scope, receive, send)

    def _check_host(self, host: str) -> None:
        if self._hosts is not None and _host_name(host) not in self._hosts:
            raise errors.forbidden_host(host)

    def _check_origin(self, origin: str | None, host: str) -> None:
        allowed = self._settings.allowed_origins
        # None is no browser. A sandboxed frame is "null" whoever wrote it, so it has to be named.
        if origin is None or origin in allowed or ("*" in allowed and origin != "null"):
            return
        if not self._is_own(origin, host):
            raise errors.forbidden_origin(origin)

    def _is_own(self, origin: str, host: str) -> bool:
        """Tell whether ``origin`` is where the request went. It means something only where the host
        was checked: a page whose name was made to resolve to us calls us by that name, too."""
        return self._hosts is not None and origin.partition("://")[2].lower() == host.lower()

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission = Work(self._stages)
        try:
            key_id = self._key_id(scope, admission)
            if scope["type"] == "websocket":
                self._check_connections(key_id)
        except ProtocolError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(key_id=key_id, admission=admission)
        if scope["type"] == "websocket":
            await self._serve_connection(key_id, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _key_id(self, scope: Scope, work: Work) -> str | None:
        if self._keys is None or scope["path"] in _OPEN_PATHS:
            return None
        began_at = time.perf_counter()
        key_id = self._keys.authenticate(Headers(scope=scope).get("authorization"))
        if scope["path"].startswith("/v1/"):
            work.add(Stage.AUTHENTICATE, time.perf_counter() - began_at)
        if key_id is None:
            raise errors.invalid_api_key()
        return key_id

    def _check_connections(self, key_id: str | None) -> None:
        for number, limit in (
            (self._connections.total(), self._settings.max_connections),
            (self._connections[key_id], self._settings.max_connections_per_key),
        ):
            if limit is not None and number >= limit:
                raise errors.too_many_connections(limit)

    async def _serve_connection(
        self, key_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._connections[key_id] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._connections[key_id] -= 1


def _own_hosts(settings: Settings) -> frozenset[str] | None:
    """Return the names that the server answers to, or None if it answers to all."""
    if not settings.is_loopback and not settings.allowed_hosts:
        return None
    names = ("localhost", "127.0.0.1", "::1", settings.host, *settings.allowed_hosts)
    return frozenset(name.strip("[]").lower() for name in names)


def _host_name(host: str) -> str:
    """Return the host of a ``Host`` header, without port and brackets; empty if it has none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found is not None else ""
