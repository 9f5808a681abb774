"""Reading ahead and writing behind."""

import threading

import pytest

from lightning_egeria.caching.store import background
from lightning_egeria.caching.store.background import READ_AHEAD_BATCHES, ReadAhead, WriteBehind


@pytest.fixture
def reader():
    made = ReadAhead()
    yield made
    made.close()


@pytest.fixture
def writer():
    made = WriteBehind()
    yield made
    made.close()


def test_reads_come_in_order(reader):
    seen = []
    futures = [reader.submit(number, lambda number=number: seen.append(number) or number) for number in range(3)]
    assert [future.result(5) for future in futures] == [0, 1, 2]
    assert seen == [0, 1, 2]


def test_reads_stay_close_to_the_batch_in_use(reader):
    futures = [reader.submit(number, lambda: None) for number in range(READ_AHEAD_BATCHES + 2)]
    futures[READ_AHEAD_BATCHES - 1].result(5)
    assert not futures[READ_AHEAD_BATCHES].done()
    reader.used(1)
    futures[READ_AHEAD_BATCHES + 1].result(5)


def test_error_is_raised_where_the_rows_are_used(reader):
    with pytest.raises(ZeroDivisionError):
        reader.submit(0, lambda: 1 // 0).result(5)
    assert reader.submit(1, lambda: 2).result(5) == 2


def test_cancelled_reads_do_not_run(reader):
    began, go = threading.Event(), threading.Event()
    first = reader.submit(0, lambda: (began.set(), go.wait(5)))
    second = reader.submit(1, lambda: pytest.fail("it was cancelled"))
    assert began.wait(5)
    threading.Timer(0.05, go.set).start()
    reader.cancel()
    assert first.done()
    assert second.cancelled()


def test_closing_twice_is_safe(reader, writer):
    for one in (reader, writer):
        one.close()
        one.close()


def test_writes_are_done_in_order(writer):
    seen = []
    for number in range(5):
        assert writer.submit(lambda number=number: seen.append(number), 1)
    writer.finish()
    assert seen == [0, 1, 2, 3, 4]


def test_closing_writes_what_is_waiting(writer):
    seen = []
    for number in range(5):
        writer.submit(lambda number=number: seen.append(number), 1)
    writer.close()
    assert seen == [0, 1, 2, 3, 4]


def test_memory_that_waits_is_bounded(writer, monkeypatch):
    monkeypatch.setattr(background, "MAX_WAITING_BYTES", 100)
    go = threading.Event()
    assert writer.submit(go.wait, 60)
    assert not writer.submit(lambda: None, 60)
    go.set()
    writer.finish()
    assert writer.submit(lambda: None, 500)  # one is always taken
