"""The socket of the benchmarks: it frames as clients do, and finds what ends a segment."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from websockets.sync.server import ServerConnection, serve

from scripts.benchmarks.raw_socket import (
    RawSocket,
    SocketError,
    masked_frame,
    skim_all,
    take_frames,
)

DELTA = '{"type":"response.output_text.delta","delta":"Well."}'
DONE = '{"type":"response.completed","response":{}}'


def frame(payload: bytes, opcode: int = 1) -> bytes:
    """Return a frame as a server sends it."""
    size = len(payload)
    if size < 126:
        header = bytes([size])
    elif size < 1 << 16:
        header = b"\x7e" + size.to_bytes(2, "big")
    else:
        header = b"\x7f" + size.to_bytes(8, "big")
    return bytes([0x80 | opcode]) + header + payload


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (125, b"\x81\xfd"),
        (126, b"\x81\xfe\x00\x7e"),
        (65536, b"\x81\xff\x00\x00\x00\x00\x00\x01\x00\x00"),
    ],
)
def test_a_frame_says_how_long_it_is_and_has_a_mask_of_zeros(size: int, header: bytes) -> None:
    assert masked_frame(b"x" * size) == header + bytes(4) + b"x" * size


@pytest.mark.parametrize("size", [0, 5, 125, 126, 65535, 65536])
def test_a_frame_is_taken_once_it_is_whole(size: int) -> None:
    sent = frame(b"x" * size) + frame(b"next")
    data = bytearray()

    taken = []
    for start in range(0, len(sent), 100):
        data += sent[start : start + 100]
        taken += list(take_frames(data))

    assert taken == [(1, b"x" * size), (1, b"next")]
    assert not data


def test_frames_of_other_kinds_are_told_apart() -> None:
    data = bytearray(frame(b"", opcode=9) + frame(b"{}"))

    assert list(take_frames(data)) == [(9, b""), (1, b"{}")]


@contextmanager
def answering(*texts: str) -> Iterator[int]:
    """Run a server that answers each frame with ``texts``, and give its port."""

    def answer(connection: ServerConnection) -> None:
        for _ in connection:
            connection.ping()
            for text in texts:
                connection.send(text)

    with serve(answer, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_segment_is_read_to_its_end_and_another_one_after_it() -> None:
    with answering(DELTA, DONE) as port, RawSocket(port, "/") as socket:
        for _ in range(2):
            socket.send({"type": "response.create"})
            times, texts = zip(*socket.segment(), strict=True)

            assert texts == (DELTA.encode(), DONE.encode())
            assert list(times) == sorted(times)


@pytest.mark.slow
def test_several_sockets_are_skimmed_until_all_have_ended() -> None:
    with (
        answering(*[DELTA] * 1000, DONE) as port,
        RawSocket(port, "/") as first,
        RawSocket(port, "/") as second,
    ):
        for socket in (first, second):
            socket.send({"type": "response.create"})

        times = skim_all([first, second])

    assert len(times) == 2
    assert all(begin <= end for begin, end in times)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ['{"type":"error","error":{}}', '{"type":"response.failed","response":{}}']
)
def test_what_failed_is_told(text: str) -> None:
    with answering(text) as port, RawSocket(port, "/") as one, RawSocket(port, "/") as other:
        one.send({})
        other.send({})

        with pytest.raises(SocketError, match=r"error|failed"):
            one.segment()
        with pytest.raises(SocketError, match=r"error|failed"):
            skim_all([other])
