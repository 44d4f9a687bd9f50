"""A WebSocket that costs its side next to nothing: it counts bytes, and looks for what ends them.

A client that parses each event would be slower than the server that it measures.
"""

import base64
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

JsonObject = dict[str, Any]

_LAST_EVENTS = (b'"response.done"', b'"response.completed"', b'"response.incomplete"')
_FAILED_EVENTS = (b'"response.failed"', b'"type":"error"')
_READ_BYTES = 1 << 18
_TIMEOUT_SECONDS = 300.0


class SocketError(RuntimeError):
    """The server refused, failed or left; the message is what it said."""


class RawSocket:
    """A connection to a server on this machine."""

    def __init__(self, port: int, path: str) -> None:
        """Open it.

        Raises:
            SocketError: the server refuses.
        """
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = bytearray()
        self._tail = b""
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self._unread:
            self._fill()
        head, _, rest = bytes(self._unread).partition(b"\r\n\r\n")
        self._unread = bytearray(rest)
        if b" 101 " not in head.partition(b"\r\n")[0]:
            raise SocketError(bytes(self._unread or head).decode(errors="replace"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, without a word."""
        self._socket.close()

    def fileno(self) -> int:
        """Return what a selector wants of it."""
        return self._socket.fileno()

    def send(self, event: JsonObject) -> None:
        """Send a text frame."""
        self._socket.sendall(masked_frame(json.dumps(event).encode()))

    def skim(self) -> bool:
        """Read what is there, frame by frame or not; True if what ends a segment is among it.

        Raises:
            SocketError: the response failed, or the server is gone.
        """
        data = self._received()
        seen = self._tail + data
        if any(name in seen for name in _FAILED_EVENTS):
            raise SocketError(seen[-600:].decode(errors="replace"))
        is_last = any(name in seen for name in _LAST_EVENTS)
        self._tail = b"" if is_last else data[-32:]  # a name may lie across two reads
        return is_last

    def frames(self) -> Iterator[tuple[float, bytes]]:
        """Give the text of each frame, and when it was read, in monotonic seconds. Pings, and what
        else is not text, are left out.

        Raises:
            SocketError: the server is gone.
        """
        now = time.monotonic()
        while True:
            for opcode, payload in take_frames(self._unread):
                if opcode == 1:
                    yield now, payload
            self._fill()
            now = time.monotonic()

    def segment(self) -> list[tuple[float, bytes]]:
        """Return the frames of a segment, up to what ends it.

        Raises:
            SocketError: the response failed, or the server is gone.
        """
        taken: list[tuple[float, bytes]] = []
        for now, text in self.frames():
            taken.append((now, text))
            # Only an event's first bytes are its own; what the model says comes later.
            if any(name in text[:80] for name in _FAILED_EVENTS):
                raise SocketError(text.decode(errors="replace"))
            if any(name in text[:80] for name in _LAST_EVENTS):
                break
        return taken

    def _fill(self) -> None:
        self._unread += self._received()

    def _received(self) -> bytes:
        if data := self._socket.recv(_READ_BYTES):
            return data
        raise SocketError("the server closed the connection")


def skim_all(sockets: Sequence[RawSocket]) -> list[tuple[float, float]]:
    """Read from all of ``sockets`` until each has ended its segment.

    Returns:
        For each when its first bytes and its last ones were read, in monotonic seconds.
    """
    times: dict[RawSocket, tuple[float, float]] = {}
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ, one)
        while selector.get_map():
            for key, _ in selector.select():
                is_last, now = key.data.skim(), time.monotonic()
                first, _ = times.get(key.data, (now, now))
                times[key.data] = first, now
                if is_last:
                    selector.unregister(key.data)
    return [times[one] for one in sockets]


def masked_frame(text: bytes) -> bytes:
    """Return a client's text frame (RFC 6455, 5.2). Its mask is zero, so that it costs nothing."""
    if len(text) < 126:
        size = bytes([0x80 | len(text)])
    elif len(text) < 1 << 16:
        size = b"\xfe" + len(text).to_bytes(2, "big")
    else:
        size = b"\xff" + len(text).to_bytes(8, "big")
    return b"\x81" + size + bytes(4) + text


def take_frames(data: bytearray) -> Iterator[tuple[int, bytes]]:
    """Take the whole frames that a server sent off ``data``, and give the opcode and the payload of
    each. They are not masked."""
    while (header := _header_size(data)) is not None:
        size = int.from_bytes(data[2:header], "big") if header > 2 else data[1] & 0x7F
        if len(data) < header + size:
            return
        opcode, payload = data[0] & 0x0F, bytes(data[header : header + size])
        del data[: header + size]
        yield opcode, payload


def _header_size(data: bytearray) -> int | None:
    """Return how long the header is, if it is there."""
    if len(data) < 2:
        return None
    size = {126: 4, 127: 10}.get(data[1] & 0x7F, 2)
    return size if len(data) >= size else None
