"""The batches of one loader: what is planned, served and recorded for them."""

import itertools
import types

import pytest
import torch
from programs.parts import Net, Samples, vectors
from streams import recorded
from torch import nn

from lightning_egeria.caching import stats
from lightning_egeria.stores import samples
from lightning_egeria.stores.store import ActivationStore

SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(autouse=True)
def _no_race(monkeypatch):
    """Nobody is asked to run batches without the cache, to compare."""
    monkeypatch.setattr(stats, "COMPARED_STEPS", 10**6)


def expected(drive, order=range(24), size=6):
    """The outputs without a cache."""
    order = list(order)
    places = [order[start : start + size] for start in range(0, len(order), size)]
    return [drive.plain(torch.stack([drive.data.data[i][0] for i in ids])) for ids in places]


def equal(found, wanted):
    return len(found) == len(wanted) and all(one.equal(other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("order", [range(24), SHUFFLED], ids=["in order", "shuffled"])
@pytest.mark.parametrize("host_bytes", [0, 300, 10**9])
def test_recorded_rows_are_served_in_any_order(drive, order, host_bytes):
    one = recorded(drive(host_bytes=host_bytes))
    assert (one.stats.misses, one.stats.written, one.stats.depth, one.stats.off) == (24, 24, 2, None)
    found = one.epoch(list(order))
    assert equal(found, expected(one, order))
    assert (one.stats.hits, one.stats.not_loaded) == (24, 22)
    assert len(one.data.loaded) == 2  # to be compared


def test_rows_without_entries_are_computed(drive):
    """Half of each batch is new."""
    one = recorded(drive(), order=list(range(12)))
    found = one.epoch(SHUFFLED)
    assert equal(found, expected(one, SHUFFLED))
    assert (one.stats.hits, one.stats.misses) == (12, 24)
    assert sorted(one.data.loaded)[2:] == list(range(12, 24))  # and two are compared


def test_batches_of_another_size_agree_before_they_are_served(drive):
    one = recorded(drive())
    for _ in range(3):
        assert equal(one.epoch(size=4), expected(one, size=4))
    assert one.stats.hits >= 24


@pytest.mark.parametrize("most", [samples.MEMORY_BYTES, 2_000])
def test_fields_are_read_once(drive, monkeypatch, most):
    """Where they have room; else the others are read each time."""
    monkeypatch.setattr(samples, "MEMORY_BYTES", most)
    read, fields = [], ActivationStore.read_fields
    monkeypatch.setattr(ActivationStore, "read_fields", lambda *args: read.append(args) or fields(*args))
    one = recorded(drive())
    counts = []
    for _ in range(4):
        read.clear()
        assert equal(one.epoch(), expected(one))
        counts.append(len(read))
    first, *later = counts  # two samples of each epoch are loaded, to be compared
    assert first == 22
    assert all(count <= 2 if most > 2_000 else count > 12 for count in later)


def test_labels_are_those_of_now(drive):
    data = Samples(lambda data, index: (data.x[index], data.y[index]))
    one = recorded(drive(data=data))
    data.y = data.y + 1
    labels = []
    one.epoch(step=lambda net, x, y: labels.append(y) or net(x))
    assert torch.cat(labels).equal(data.y)
    assert len(one.data.loaded) == 24


def test_changed_samples_are_computed_anew(drive):
    FILES.update(enumerate(vectors().tensors[0]))
    one = recorded(drive(data=Samples(_from_files)))
    FILES[7] = FILES[7] * 2
    one.stream.forget_verified()
    assert equal(one.epoch(), expected(one))
    assert (one.stats.hits, one.stats.misses) == (23, 25)
    one.settle()
    assert equal(one.epoch(), expected(one))
    assert one.stats.hits == 47


FILES = {}  # stand for files, which the cache cannot look into


def _from_files(data, index):
    return FILES[index], index


def test_random_samples_are_loaded_in_each_epoch(drive):
    data = Samples(lambda data, index: (data.x[index] + torch.rand(()) * (index == 3), index))
    one = recorded(drive(data=data))
    one.epoch()
    assert len(one.data.loaded) == 24
    assert one.stats.not_loaded == 0
    assert one.stats.hits == 23


@pytest.mark.parametrize("views", [1, 2])
def test_views_come_again(drive, views):
    data = Samples(lambda data, index: (data.x[index] + torch.rand(8), index))
    one = drive(data=data, views=views)
    state, found = torch.get_rng_state(), []
    for _ in range(2 * views):
        found.append(torch.cat(one.epoch(SHUFFLED)))
        one.settle()
    assert torch.get_rng_state().equal(state)
    assert [one.stats.hits, one.stats.written] == [24 * views, 24 * views]
    assert found[0].equal(found[views])
    assert len({str(output.tolist()) for output in found}) == views


def test_entries_that_nobody_will_read_are_not_written(drive):
    one = drive()
    one.epochs = 2
    recorded(one, epochs=3)
    assert (one.stats.misses, one.stats.to_write) == (24, 0)


def test_deeper_boundary_goes_on_from_the_old_one(drive):
    one = recorded(drive(depth=1))
    one.freeze(2)
    one.epoch()
    one.settle()
    one.epoch(SHUFFLED)
    assert one.stats.advanced > 0
    assert equal(one.epoch(SHUFFLED), expected(one, SHUFFLED))
    assert [level.depth for level in one.stream.levels] == [2]


def test_unfreezing_removes_the_stores(drive, tmp_path):
    one = recorded(drive())
    assert len(list((tmp_path / "cache").iterdir())) == 1
    one.stream.start(None, keep=False)
    assert list((tmp_path / "cache").iterdir()) == []
    assert (one.stats.off, one.stats.depth) == ("nothing is frozen", 0)


def test_closing_leaves_the_stores(drive, tmp_path):
    one = recorded(drive())
    one.close()
    one.close()
    assert one.stats.bytes_on_disk > 0
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_second_stream_starts_warm(drive):
    recorded(drive()).close()
    one = drive()
    assert equal(one.epoch(SHUFFLED), expected(one, SHUFFLED))
    one.settle()
    assert one.stats.written == 0
    assert one.stats.hits == 18  # all but the batch of the trial


def test_other_weights_have_another_store(drive, tmp_path):
    recorded(drive()).close()
    net = Net()
    with torch.no_grad():
        net.a[0].weight[0, 0] += 1
    assert recorded(drive(net=net)).stats.written == 24
    assert len(list((tmp_path / "cache").iterdir())) == 2


def _stops(one, match, epochs=8, **arguments):
    with pytest.warns(UserWarning, match=match):
        [one.epoch(**arguments) for _ in range(epochs)]
    assert one.stats.off is not None
    assert one.stats.depth == 0
    assert len(one.stream.levels) == 0


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


LAYERS = {
    "random": (Noise, "the same input gave another output"),
    "statistics of the batch": (Mean, "depends on the other samples of its batch"),
    "counter": (Counter, "attributes of the frozen layers change"),
}


@pytest.mark.parametrize(("layer", "reason"), LAYERS.values(), ids=LAYERS)
def test_front_that_cannot_be_cached(drive, layer, reason):
    net = Net()
    net.a.append(layer())
    _stops(drive(net=net), f"the cache of training is off: .*{reason}")


def test_other_calls_of_the_network_stop_the_cache(drive):
    _stops(drive(), "was not called with tensors of the batch", step=lambda net, x, y: x)


def test_samples_of_another_size_are_told_once(drive, caplog):
    data = Samples(lambda data, index: (data.x[index].expand(*([8] if index < 12 else []), 8), index))
    with caplog.at_level("INFO"):
        one = recorded(drive(data=data))
        one.epoch()
        one.epoch()
    assert (one.stats.hits, one.stats.off) == (24, None)
    assert caplog.text.count("an output of shape (6, 8) has no place among entries") == 1


def test_network_that_gets_noise_stops_the_cache(drive):
    _stops(drive(), "off: .*differed from those", epochs=12, step=lambda net, x, y: net(x + torch.rand_like(x)))


def test_reading_the_input_in_most_batches_loads_it(drive, caplog):
    one = drive()
    with caplog.at_level("INFO"):
        for _ in range(8):
            one.epoch(step=lambda net, x, y: net(x) + x.mean())
            one.settle()
    assert "reads the input in most batches" in caplog.text
    assert one.stats.hits > 100
    one.data.loaded.clear()
    one.epoch(step=lambda net, x, y: net(x) + x.mean())
    assert len(one.data.loaded) == 24
    assert one.stats.loaded_after_all <= 24 * 7


def _spoil(one):
    level = one.stream.levels.all[0]
    for number in range(24):
        fields = level.store.read_fields(number)
        level.store.forget(number)
        level.store.write(number, torch.ones(8).numpy().view("u1"), (8,), fields)


def test_wrong_entries_are_not_served(drive):
    """Each epoch begins with a comparison. Then all is computed anew; the second time, the cache stops."""
    one = recorded(drive(host_bytes=0))
    _spoil(one)
    with pytest.warns(UserWarning, match="entries differ from what the frozen layers compute, so all are dropped"):
        assert equal(one.epoch(), expected(one))
    assert (one.stats.wrong, one.stats.hits, one.stats.off) == (2, 0, None)
    one.epoch()
    one.settle()
    hits = one.stats.hits
    assert equal(one.epoch(), expected(one))
    assert one.stats.hits == hits + 24
    _spoil(one)
    with pytest.warns(UserWarning, match="is off: entries differ from what the frozen layers compute"):
        assert equal(one.epoch(), expected(one))
    assert (one.stats.wrong, one.stats.hits, one.stats.depth) == (4, hits + 24, 0)


SHIFT = []  # where the cache does not look


@pytest.mark.parametrize("strided", [False, True])
def test_a_change_that_cannot_be_seen_is_found(drive, strided, caplog):
    """At the start of the next epoch, before a batch is trained on old samples."""

    def sample(data, index):
        x = data.x[index] + len(SHIFT)
        return (torch.stack([x, x], 1)[:, 0] if strided else x), index

    SHIFT.clear()
    one = recorded(drive(data=Samples(sample)))
    assert equal(one.epoch(), expected(one))
    assert "samples change" not in caplog.text
    SHIFT.append(1)
    with caplog.at_level("INFO"):
        found = one.epoch()
    assert "samples change where the cache cannot see it" in caplog.text
    with torch.no_grad():
        x = torch.stack([one.data[index][0] for index in range(24)])
        assert equal(found, [one.plain(part) for part in x.split(6)])


def test_progress_is_the_share_that_is_recorded(drive, monkeypatch):
    monkeypatch.setattr("lightning_egeria.caching.level_set.COUNT_EVERY_S", -1.0)
    one = drive()
    assert one.stream.progress_text() is None
    recorded(one, order=list(range(12)))
    assert one.stream.progress_text() == "50%"
    recorded(one)
    assert one.stream.progress_text() is None


def test_gradients_behind_the_boundary_are_the_same(drive):
    one = recorded(drive())
    one.plain(vectors()[:6][0]).square().sum().backward()
    one.batch(list(range(6))).square().sum().backward()
    assert equal(*([parameter.grad for parameter in net.head.parameters()] for net in (one.plain, one.net)))


@pytest.mark.parametrize("copied", [0, 2**20])
def test_input_that_numpy_changes_between_two_forwards(drive, monkeypatch, copied):
    """The version of the tensor stays. Small tensors are copied when a call is recorded, large ones are not."""
    monkeypatch.setattr("lightning_egeria.lazy.meta.MOST_BYTES", copied)

    count = itertools.count()

    def step(net, x, y):
        before = net(x).clone() if next(count) % 2 else None
        memory = x.numpy()
        memory *= -1
        after = net(x)
        return torch.stack([after, after if before is None else before])

    one = recorded(drive(), step=step)
    for number, (after, before) in enumerate(one.epoch(step=step)):
        x = torch.stack([one.data.data[index][0] for index in range(6 * number, 6 * number + 6)])
        assert after.equal(one.plain(-x))
        assert before.equal(one.plain(x if number % 2 else -x))


class Positions(nn.Module):
    """Adds a vector for each position, which has as many rows as a text has words."""

    def __init__(self):
        super().__init__()
        self.word, self.positions = nn.Linear(1, 8), nn.Embedding(50, 8)

    def forward(self, text):
        return self.word(text[..., None]) + self.positions(torch.arange(text.shape[1]))


class Reader(nn.Sequential):
    """Texts of one length."""

    def __init__(self):
        super().__init__(Positions(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def test_text_as_long_as_the_batch_is_tried_again(drive):
    texts = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.arange(24))
    one = drive(data=texts, net=Reader(), depth=3)
    one.epoch(size=6, order=range(6))
    assert (one.stats.written, one.stats.off) == (0, None)
    one.epoch(size=8)
    one.settle()
    assert equal(one.epoch(SHUFFLED, size=8), expected(one, SHUFFLED, size=8))
    assert (one.stats.hits, one.stats.off) == (24, None)


def test_texts_always_as_long_as_the_batch_end_the_cache(drive):
    texts = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.arange(24))
    one = drive(data=texts, net=Reader(), depth=3)
    with pytest.warns(UserWarning, match="try another batch size"):
        found = [one.epoch(size=6) for _ in range(3)]
    assert one.stats.off is not None
    assert all(equal(outputs, expected(one, size=6)) for outputs in found)


def rounded(drive, order, depth=2, size=6):
    """The outputs of the network with the boundary's output as an entry gives it back."""
    parts = [drive.plain.a, drive.plain.b, drive.plain.c, drive.plain.head]
    form = drive.stream.levels.at(depth).form
    found = []
    for start in range(0, len(order), size):
        x = torch.stack([drive.data.data[i][0] for i in order[start : start + size]])
        found.append(nn.Sequential(*parts[depth:])(form.rounded(nn.Sequential(*parts[:depth])(x))))
    return found


@pytest.mark.parametrize(("precision", "row_bytes"), [("bf16", 16), ("int8", 9)])
def test_rounded_outputs_are_the_same_served_or_computed(drive, precision, row_bytes):
    one = drive(precision=precision)
    first = one.epoch(range(12))
    one.settle()
    assert equal(first, rounded(one, range(12)))
    assert not equal(first, expected(one, range(12)))
    for _ in range(2):
        assert equal(one.epoch(SHUFFLED), rounded(one, SHUFFLED))
        one.settle()
    assert (one.stats.hits, one.stats.misses, one.stats.wrong) == (36, 24, 0)
    assert one.stream.levels.at(2).form.row_bytes == row_bytes


def test_rounded_entries_lead_to_no_deeper_ones(drive):
    one = recorded(drive(depth=1, precision="int8"))
    one.freeze(2)
    for _ in range(3):
        found = one.epoch(SHUFFLED)
        one.settle()
    assert equal(found, rounded(one, SHUFFLED))
    assert (one.stats.advanced, one.stats.wrong, one.stats.off) == (0, 0, None)


def test_runs_of_another_precision_share_no_entries(drive):
    one = recorded(drive())
    folder = one.stream.levels.at(2).store.folder
    one.close()
    other = recorded(drive(precision="bf16"))
    assert other.stream.levels.at(2).store.folder != folder
    assert other.stats.misses == 24


def test_time_of_a_trial_is_not_saved(drive, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(stats, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    one = drive()
    one.epoch(range(12))
    assert one.stats.depth == 2
    assert one.stats.seconds_saved == -1
