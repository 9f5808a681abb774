"""Messages between two processes."""

import io
import tracemalloc

import pytest

from lightning_egeria.core.snapshots.framing import read_part, write_parts


@pytest.mark.parametrize("parts", [[], [b""], [b"one", b"", b"three"], [bytes(100_000)]])
def test_parts_arrive_as_they_were(parts):
    stream = io.BytesIO()
    write_parts(stream, parts)
    stream.seek(0)
    assert [bytes(read_part(stream)) for _ in parts] == parts
    with pytest.raises(EOFError):
        read_part(stream)


def test_a_stream_that_gives_a_few_bytes_at_a_time():
    class Slow(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(buffer[:3])

    stream = Slow()
    write_parts(stream, [b"longer than three"])
    stream.seek(0)
    assert read_part(stream) == b"longer than three"


def test_what_a_message_says_is_not_allocated():
    tracemalloc.start()
    try:
        with pytest.raises(EOFError):
            read_part(io.BytesIO((2**27).to_bytes(8, "little") + b"x"))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
