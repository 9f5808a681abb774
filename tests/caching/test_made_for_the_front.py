"""What the training step, or a hook, makes of the batch for the frozen front: entries are of the same rows only."""

import functools
from datetime import timedelta

import numpy as np
import pytest
import torch
from agreement import ChecksRanks
from cached_runs import Classifier, Net, fit, images, loader_of
from lightning.pytorch.strategies import DDPStrategy
from ranks import all_well, in_ranks
from test_same_training import assert_same_training, pair
from test_texts import Encoder, assert_same_training_as_said, texts
from torch import nn
from torch.utils.data import TensorDataset

from lightning_egeria.caching.levels import Level, MemoryTier, RowForm
from lightning_egeria.caching.made import UNKNOWN, MadeArguments
from lightning_egeria.caching.store import ActivationStore, Manifest

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule` but"),
]


class Prepared(Classifier):
    """The training step changes the input before the network gets it."""

    def __init__(self, change, net=None):
        super().__init__(net)
        self.change = change

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((self.change(self, x), y), batch_idx)


class PreparedByHook(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.sub(0.1).mul(1.5), y


def bytes_of_images():
    x, y = images().tensors
    return TensorDataset(((x - x.amin()) * 30).to(torch.uint8), y)


def compare(make, cache_dir, data, schedule, epochs=8):
    plain, cached = pair(make)
    fit(plain, data(), schedule, epochs=epochs)
    wrapped = fit(cached, data(), schedule, {"cache_dir": cache_dir}, epochs=epochs)
    return plain, cached, wrapped


def normalised(step, x):
    return (x - 0.1) / 0.9


def flipped(step, x):
    return x.flip(3)


def in_place(step, x):
    return x.sub_(0.1)


def channels_last(step, x):
    return normalised(step, x).to(memory_format=torch.channels_last)


def of_bytes(step, x):
    return x.float() / 255


@pytest.mark.parametrize(
    "make",
    [
        *(functools.partial(Prepared, change) for change in (normalised, flipped, in_place, channels_last, of_bytes)),
        PreparedByHook,
    ],
    ids=["normalised", "flipped", "in place", "channels last", "bytes", "hook"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_the_same_each_time_is_cached(tmp_path, make, workers, caplog):
    dataset = bytes_of_images() if getattr(make, "args", ()) == (of_bytes,) else images()

    def data():
        return loader_of(dataset, num_workers=workers)

    with caplog.at_level("INFO", "lightning.pytorch"):
        plain, cached, wrapped = compare(make, tmp_path, data, {8: 2, 22: 3})
    assert wrapped.stats.cut == 3
    assert wrapped.stats.hits + wrapped.stats.advanced > 100  # how many of each depends on when workers fetch
    assert wrapped.stats.advanced > 0
    assert wrapped.stats.not_loaded == 0
    assert wrapped.stats.wrong == 0
    assert wrapped.stats.off is None
    assert "inputs are loaded all the same" in caplog.text
    assert_same_training(plain, cached)


def test_a_compiled_network(tmp_path):
    def make():
        module = Prepared(normalised)
        module.net.compile(backend="aot_eager")
        return module

    plain, cached, wrapped = compare(make, tmp_path, lambda: loader_of(images()), {8: 2})
    assert wrapped.stats.hits > 100
    assert_same_training(plain, cached)


class MaskedBySteps(Classifier):
    """The batch has a mask as well, which is not used."""

    def __init__(self, mask):
        super().__init__(Encoder())
        self.mask = mask

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["ids"], self.mask(batch["ids"])), batch["label"])
        self.losses.append(loss.detach().clone())
        return loss


def of_words(ids):
    return ids != 0


def test_a_mask_of_padded_texts(tmp_path, caplog):
    with caplog.at_level("INFO", "lightning.pytorch"):
        plain, cached, wrapped = compare(lambda: MaskedBySteps(of_words), tmp_path, texts, {8: 2, 26: 3}, epochs=10)
    assert wrapped.stats.cut == 3
    assert wrapped.stats.hits > 150
    assert wrapped.stats.wrong == 0
    assert_same_training_as_said(plain, cached, caplog.text)


class PlacesEncoder(Encoder):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(20, 16)

    def forward(self, ids, places):
        hidden, mask = self.embedding(ids) + self.places(places), ids != 0
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~mask)
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class WithPlaces(MaskedBySteps):
    def __init__(self):
        super().__init__(lambda ids: torch.arange(ids.shape[1]).expand_as(ids))
        self.net = PlacesEncoder()


def test_what_goes_on_behind_the_end_of_a_text_cannot_be_known_again(tmp_path):
    plain, cached, wrapped = compare(WithPlaces, tmp_path, texts, {8: 3}, epochs=10)
    assert wrapped.stats.cut == 1  # the words, which are given as they came
    assert wrapped.stats.hits > 150
    assert wrapped.stats.wrong == 0
    assert_same_training(plain, cached)


class Weighed(Net):
    """Behind its first layers, rows are multiplied by weights that it is given."""

    def forward(self, x, weights):
        x = self.a(self.stem(x))
        x = torch.stack([row * weight for row, weight in zip(x, weights.tolist(), strict=True)])
        return self.head(self.c(self.b(x)).mean((2, 3)))


class WithWeights(Classifier):
    def __init__(self):
        super().__init__(Weighed())
        self.generator = np.random.default_rng(0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        weights = torch.from_numpy(self.generator.uniform(0.5, 1.5, len(x)))
        loss = nn.functional.cross_entropy(self.net(x, weights), y)
        self.losses.append(loss.detach().clone())
        return loss


def test_what_turns_out_to_vary_moves_the_boundary_in_front_of_it(tmp_path, caplog):
    """Random numbers of a generator of its own: only the next time that a sample comes shows it."""
    with caplog.at_level("INFO", "lightning.pytorch"):
        plain, cached, wrapped = compare(WithWeights, tmp_path, lambda: loader_of(images()), {8: 3}, epochs=10)
    assert caplog.text.count("the outputs of 'net.b.2' will take") == 1
    assert caplog.text.count("the outputs of 'net.a.2' will take") == 1
    assert wrapped.stats.cut == 2
    assert wrapped.stats.hits > 100
    assert wrapped.stats.off is None
    assert_same_training(plain, cached)


class FrontDoesNotLearn(Prepared):
    """Its front is the same in all runs."""

    def __init__(self, change):
        super().__init__(change)
        self.net.stem.eval()
        self.net.a.eval()

    def configure_optimizers(self):
        front = [*self.net.stem.parameters(), *self.net.a.parameters()]
        back = [*self.net.b.parameters(), *self.net.c.parameters(), *self.net.head.parameters()]
        return torch.optim.SGD([{"params": front, "lr": 0.0}, {"params": back}], 0.05)


def flipped_later(module, x):
    return normalised(module, x) if module.global_step < 6 else flipped(module, x)


TOLD = {
    normalised: [],
    flipped: ["is not what it gives now"],
    flipped_later: ["is not what was cached of it"],
}


@pytest.mark.parametrize("change", TOLD)
def test_entries_of_an_earlier_run_are_of_the_same_rows_only(tmp_path, change, recwarn):
    def train(change, cache):
        torch.manual_seed(0)
        module = FrontDoesNotLearn(change)
        return module, fit(module, loader_of(images()), {1: 2}, cache, epochs=6)

    plain, _ = train(change, None)
    _, first = train(normalised, {"cache_dir": tmp_path})
    cached, second = train(change, {"cache_dir": tmp_path})
    told = [str(warning.message) for warning in recwarn if "is dropped" in str(warning.message)]
    assert len(told) == len(TOLD[change])
    assert all(part in text for part, text in zip(TOLD[change], told, strict=True))
    if change is normalised:
        assert second.stats.hits > first.stats.hits
    else:
        assert second.stats.hits > 40
    assert_same_training(plain, cached)


def run_in_a_rank(cache_dir):
    torch.manual_seed(0)
    module = Prepared(normalised)
    wrapped = fit(
        module,
        loader_of(images(count=48), batch_size=4),
        {4: 2, 18: 3},
        None if cache_dir is None else {"cache_dir": cache_dir},
        epochs=8,
        trainer_options={"devices": 2, "strategy": DDPStrategy(timeout=timedelta(seconds=60))},
        evaluate_every_n_steps=1,
        callbacks=[ChecksRanks()],
    )
    return [float(loss) for loss in module.losses], wrapped.stats.hits if wrapped is not None else 0


def test_ranks_know_what_others_have_written(tmp_path):
    plain = all_well(in_ranks(2, functools.partial(run_in_a_rank, None)))
    cached = all_well(in_ranks(2, functools.partial(run_in_a_rank, tmp_path)))
    for (losses, _), (cached_losses, hits) in zip(plain, cached, strict=True):
        assert hits > 50
        assert cached_losses == losses


def digests(x, lengths=None, length=None, numbers=(0,)):
    given = x if isinstance(x, list) else [x]
    return MadeArguments(numbers).digests(given, len(given[0]), lengths, length)


def test_a_digest_is_of_the_row_and_of_how_it_lies_in_memory():
    x, weights = torch.rand(4, 3, 5, 5), torch.arange(4)
    first = digests([x, weights], numbers=(0, 1))
    assert len(set(first.tolist())) == 4
    assert (digests([x.flip(0), weights.flip(0)], numbers=(0, 1)) == first[::-1]).all()
    assert (digests([x[:1], weights[:1]], numbers=(0, 1)) == first[:1]).all()
    assert (digests([x, weights + 1], numbers=(0, 1)) != first).all()
    assert (digests([x, weights + 1]) == digests([x, weights])).all()
    assert (digests(x.double()) != digests(x)).all()
    in_memory = x.to(memory_format=torch.channels_last)
    assert (digests(in_memory) != digests(x)).all()
    assert (digests(in_memory[:1]) == digests(in_memory)[:1]).all()
    assert (digests(torch.ones(2, 2, 3)) != digests(torch.ones(2, 3, 2))).all()
    assert (MadeArguments([0]).digests([x], 3, None, None) == UNKNOWN).all()  # not a row for each of three samples


def test_a_batch_of_one_has_the_digest_of_the_sample():
    """Dimensions of one have whatever stride they please."""
    many = torch.rand(3, 3, 4, 4)
    one = many[1:2].clone().as_strided((1, 3, 4, 4), (16, 16, 4, 1))
    assert (digests(one) == digests(many)[1:2]).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.stack([x.std((1, 2, 3))]).T,
        lambda x: x[:, 0, 0, 0],
        lambda x: torch.fft.fft2(x).conj(),
        lambda x: x.bfloat16(),
        lambda x: x > 0,
        lambda x: x[:, :, :0],
    ],
    ids=["column", "number", "conjugate", "bfloat16", "bool", "nothing"],
)
def test_digests_of_all_kinds_of_tensors(make):
    x = torch.rand(3, 2, 4, 4) - 0.5
    first = digests(make(x))
    assert (first != UNKNOWN).all()
    assert (digests(make(x.flip(0))) == first[::-1]).all()


@pytest.mark.parametrize("x", [torch.eye(3).to_sparse(), torch.empty(3, 2, device="meta")])
def test_what_has_no_values_in_memory_has_no_digest(x):
    assert (MadeArguments([0]).digests([x], 3, None, None) == UNKNOWN).all()


def test_a_digest_of_a_padded_row_is_that_of_the_row():
    made, mask = MadeArguments([0]), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, :3] = mask[1, :6] = True
    first = made.digests([mask], 2, [3, 6], 6)
    assert (first != UNKNOWN).all()
    assert made.digests([mask[:1, :4]], 1, [3], 4) == first[0]
    assert made.digests([~mask[:1]], 1, [3], 6) == UNKNOWN  # what is behind it is something else
    assert repr(made) == "(0,) {0: [0]} {0: b'\\x00'}"
    square = mask[:, :, None] & mask[:, None]
    pairs = MadeArguments([0])
    known = pairs.digests([square], 2, [3, 6], 6)
    assert (known != UNKNOWN).all()
    assert pairs.digests([square[:1, :4, :4]], 1, [3], 4) == known[0]
    assert pairs.digests([square[:1, :4, :5]], 1, [3], 4) == UNKNOWN
    assert pairs.digests([square[:1, :4, :4]], 1, [5], 4) == UNKNOWN  # longer than its batch
    square[0, 5, 1] = True
    assert pairs.digests([square], 2, [3, 6], 6).tolist() == [UNKNOWN, known[1]]
    places = torch.arange(6).expand(2, 6)
    assert digests(places, [3, 5], 6).tolist() == [UNKNOWN, UNKNOWN]


def test_only_dimensions_of_positions_are_cut():
    """As many heads as the second batch has positions, by chance."""
    made, heads = MadeArguments([0]), torch.zeros(2, 4, 6)
    first = made.digests([heads], 2, [3, 6], 6)
    assert made.digests([heads[:1, :, :4]], 1, [3], 4) == first[0]


def level_of(store, rows, host_bytes):
    form, cpu = RowForm.of(rows), torch.device("cpu")
    tiers = MemoryTier(host_bytes, form, 3, cpu, True), MemoryTier(0, form, 0, cpu)
    return Level(1, form, store, *tiers, None, MadeArguments([0]))


@pytest.mark.parametrize("host_bytes", [0, 1000])
def test_a_digest_is_that_of_the_row_it_comes_with(tmp_path, host_bytes):
    """Also where another process has written the entry anew, of something else."""
    rows = torch.rand(3, 4)
    manifest = Manifest("store", 3, 16, 8, "torch.float32", (0, 1), {})
    store = ActivationStore.create(tmp_path / "store", manifest)

    def write(number, row, fields):
        store.write(number, row.view(torch.uint8).numpy(), (4,), fields)

    write(0, rows[0], bytes([7, *[0] * 7]))
    write(1, rows[1], b"")
    level = level_of(store, rows, host_bytes)
    found, sound = level.read(np.arange(3), False)
    assert sound.tolist() == [True, False, False]
    assert found.digests.tolist() == [7]
    assert level.present(np.arange(3)).tolist() == [True, False, False]
    write(0, rows[2], bytes([9, *[0] * 7]))
    (row, digest) = (level.read(np.array([0]), False)[0].data[0], level.read(np.array([0]), False)[0].digests[0])
    assert (row.equal(rows[0]), digest) == (True, 7) if host_bytes else (row.equal(rows[2]), digest) == (True, 9)
    store.close()


class Penalised(Classifier):
    """Begins to ask for the gradient by its input in the middle of the run."""

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone(), batch[1]
        if self.global_step < 22:
            return super().training_step((x, y), batch_idx)
        x.requires_grad_()
        loss = nn.functional.cross_entropy(self.net(x), y)
        (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
        self.losses.append(loss.detach().clone())
        return loss + by_input.square().sum()


def test_a_gradient_by_the_input(tmp_path):
    plain, cached, wrapped = compare(Penalised, tmp_path, lambda: loader_of(images()), {8: 2})
    assert wrapped.stats.hits > 20
    assert_same_training(plain, cached)


def test_a_smaller_last_batch_that_is_made_otherwise_is_a_miss(tmp_path):
    def uneven(step, x):
        return 1.5 * x + (len(x) < 8)

    plain, cached, wrapped = compare(lambda: Prepared(uneven), tmp_path, lambda: loader_of(images(43)), {8: 2}, 10)
    assert wrapped.stats.hits > 100
    assert wrapped.stats.off is None
    assert_same_training(plain, cached)
