"""What the operator chose."""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

_MIB = 1024 * 1024
_DAY_SECONDS = 24 * 60 * 60

# What a browser sends as Origin (RFC 6454, 7): no path, no user. "null" is what it sends for files
# and sandboxed frames.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+|null|\*")

# A name, or an address of version 4 or 6.
_HOST = re.compile(r"[^\s:/\[\]]+|\[?[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*\]?")


def default_data_dir() -> Path:
    """Return where responses and the ledger are kept, by the system's custom."""
    return platformdirs.user_data_path("suspended-sampling")


class SettingsError(ValueError):
    """Choices that make no sense together; the message is for the operator."""


@dataclass(frozen=True)
class Settings:
    """How the server is to behave; what it runs on is the engine's business.

    A limit that is None is no limit. Where limits are per key and there are no API keys, all
    clients share one.

    Raises:
        SettingsError: two choices contradict each other, or one has no meaning.
    """

    seed: int | None = None
    """Of requests that bring none; None draws a fresh one for each."""

    # Who may come in.

    host: str = "127.0.0.1"
    """The address that is listened on: on a loopback address only its own names are answered to."""
    api_key_file: Path | None = None
    """The keys that are let in, by their hashes; None lets everyone in."""
    allowed_origins: tuple[str, ...] = ()
    """Of the web pages that may use the server, as ``scheme://host[:port]``; ``*`` means each."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of the server, without a port. Any here are checked on every address."""
    max_connections: int | None = 1000
    """How many WebSockets may be open."""
    max_connections_per_key: int | None = None
    """How many WebSockets may be open per key."""

    # How much.

    max_frame_bytes: int = 128 * _MIB
    """The longest frame or body that is read, before and after decompression."""
    max_queued_creates: int = 16
    """How many creates may wait on one lane while a response is being sampled."""
    max_in_flight: int = 16
    """How many responses of one connection are sampled at a time; further ones wait."""
    max_lanes: int = 32
    """How many named lanes one connection may open in its life."""
    max_pending_steers: int = 32
    """How many steers may wait for one response to take them."""
    max_output_tokens: int | None = None
    """The most a response or segment may have, whatever it asks for."""
    max_suspended_per_key: int | None = None
    """How many runs may be suspended per key; the one that waited longest makes room."""
    recent_responses: int = 8
    """How many recent HTTP responses keep their KV cache, per key; 0 computes all again."""

    # How long.

    suspend_ttl_seconds: float = 600
    """How long a suspended run waits for the outputs of its calls."""
    connection_lifetime_seconds: float = 60 * 60
    """How long a WebSocket may be open (OpenAI, WebSocket mode: 60 minutes)."""
    send_timeout_seconds: float = 60
    """How long a client may read nothing before it counts as gone."""
    ping_interval_seconds: float = 20
    """How often each WebSocket is pinged; 0 is never. No pong is insisted on."""
    drain_seconds: float = 30
    """How long responses may go on once the process is told to end."""

    # What is done before and after inference.

    models_file: Path | None = None
    """What the names of models mean and what they cost (``docs/models.md``)."""
    safety: str = "off"
    """What classifies input and output: ``off``, ``embedded``, or ``module:Class``."""
    replay_files: tuple[Path, ...] = ()
    """Traces that requests may have replayed instead of sampling (``docs/traces.md``)."""

    # What is kept.

    store: bool = True
    """Whether responses that ask for it are stored."""
    ledger: bool = True
    """Whether usage and cost of each run are recorded."""
    data_dir: Path | None = None
    """Where both are kept; None keeps them no longer than the process lives."""
    store_ttl_seconds: float = 30 * _DAY_SECONDS
    """How long they are stored (OpenAI, conversation state: 30 days)."""

    def __post_init__(self) -> None:
        if self.data_dir is not None and not (self.store or self.ledger):
            raise SettingsError("a data directory is of no use where nothing is stored")
        if (self.max_connections_per_key or 0) > (self.max_connections or float("inf")):
            raise SettingsError("one key may open more connections than there may be at all")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise SettingsError(
                    f"expected an origin as scheme://host[:port] in lower case, 'null' or '*', "
                    f"got {origin!r}"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise SettingsError(f"expected the name of a host without a port, got {host!r}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def warnings(self) -> Iterator[str]:
        """Give what the operator should know about choices that are dangerous."""
        if self.api_key_file is not None:
            return
        if not self.is_loopback:
            yield (
                f"listening on {self.host} without API keys: "
                "whoever can reach this address can use the model"
            )
        if "*" in self.allowed_origins:
            yield "all origins are allowed without API keys: any web page can use the model"
