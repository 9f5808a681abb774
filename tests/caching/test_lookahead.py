"""Selective-Backprop on cached entries is the same without the cache, bit for bit, and loads less."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

from lightning_egeria import FrozenPrefixCache, SelectiveBackprop
from lightning_egeria.errors import UnsupportedError
from support.methods import scripted
from support.models import Classifier, ConvNet, Transformer, equal, fit, images, loader
from support.selecting import Checkpoints

LOADED = []  # an attribute of the dataset that changes would mean that the data do


class Noted(Dataset):
    """Notes what is loaded."""

    def __init__(self):
        self.data = images(48)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        LOADED.append(index)
        return self.data[index]


def run(cached, collate=default_collate, **options):
    torch.manual_seed(0)
    LOADED.clear()
    module = Classifier(ConvNet(dropout=0))
    batches = DataLoader(Noted(), 8, shuffle=True, collate_fn=collate)
    source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
    selecting = SelectiveBackprop(source, **options)
    fit(module, scripted({3: 1, 8: 2}), data=selecting, epochs=5)
    return module, selecting.selection, source


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staleness": 1},
        {"mode": "in_batch"},
        {"mode": "in_batch", "staleness": 1, "full_every": 3},
        {"mode": "in_batch", "beta": 0, "share": 0.5},
    ],
)
@pytest.mark.usefixtures("written_at_once")
def test_selection_and_training_are_those_without_the_cache(options):
    plain, selection, _ = run(False, **options)
    module, other, cache = run(True, **options)
    assert module.losses == plain.losses
    assert equal(module, plain)
    assert selection.epochs == other.epochs
    assert cache.stats.off is None
    if options.get("beta") == 0 or "staleness" in options:  # batches are not looked at, or few, so few entries are made
        return
    # Each sample is loaded in the first epoch, for its entries, and to see whether it is random; few after that.
    assert len(LOADED) < 48 * 4 + 24
    assert cache.stats.not_loaded > 80


def test_a_collate_function_that_draws_is_not_run_again():
    def noisy(samples):
        x, labels = default_collate(samples)
        return x, labels, torch.rand(len(x))

    class Noisy(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        module = Noisy(ConvNet(dropout=0.2))  # so random numbers matter
        batches = DataLoader(Noted(), 8, collate_fn=noisy)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({3: 1}), data=SelectiveBackprop(source), epochs=4)
        found.append(module)
    assert equal(*found)


def test_samples_are_those_of_the_rows_where_collate_sorts():
    def sorted_by_label(samples):
        return default_collate(sorted(samples, key=lambda sample: int(sample[1])))

    plain, _, _ = run(False, sorted_by_label)
    module, _, cache = run(True, sorted_by_label)
    assert module.losses == plain.losses
    assert equal(module, plain)
    assert cache.stats.hits > 0


@pytest.mark.filterwarnings("ignore:cache. the cache of training is off")
def test_a_collate_function_takes_samples_twice():
    """So rows of a tensor are not samples."""

    def joined(samples):
        both = torch.stack([sample[0] for sample in samples] * 2)
        return {"x": both[: len(samples)], "more": [both[6:]], "y": torch.stack([sample[1] for sample in samples])}

    class Both(Classifier):
        def training_step(self, batch, batch_idx):
            x = batch["x"] + batch["more"][0].mean()
            return super().training_step((x, batch["y"]), batch_idx)

    def loss(module, batch):
        return nn.functional.cross_entropy(module.net(batch["x"]), batch["y"], reduction="none")

    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        module = Both(ConvNet(dropout=0))
        batches = DataLoader(images(48), 8, shuffle=True, collate_fn=joined)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        data = SelectiveBackprop(source, mode="in_batch", per_sample_loss=loss)
        fit(module, scripted({3: 1}), data=data, epochs=3)
        found.append(module)
    assert found[0].losses == found[1].losses
    assert equal(*found)


def test_without_a_freeze_it_is_out_of_the_way():
    found = []
    for cached in (False, True):
        module, batches = Classifier(), loader(shuffle=True)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({}), data=SelectiveBackprop(source, staleness=1))
        found.append(module)
    assert equal(*found)


class Texts(Dataset):
    """Texts of two to five tokens."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (2 + index % 4,), generator=generator), index % 3


def padded(samples):
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


def of_one_length(samples):
    texts, labels = padded(samples)
    return nn.functional.pad(texts, (0, 5 - texts.shape[1])), labels


def both_ways(collate, options):
    """Train on texts without and with the cache; yields each module and its data once it is trained."""
    for cached in (False, True):
        torch.manual_seed(0)
        module = Classifier(Transformer(dropout=0))
        batches = DataLoader(Texts(), 8, shuffle=True, collate_fn=collate)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({1: 2}), data=SelectiveBackprop(source, **options), epochs=6)
        yield module, source


@pytest.mark.parametrize(
    ("collate", "options"),
    [
        (padded, {"mode": "in_batch"}),
        (padded, {}),
        (padded, {"staleness": 1}),
        (of_one_length, {}),
        (of_one_length, {"mode": "in_batch", "share": 0.25}),
    ],
)
def test_samples_of_texts_come_from_entries(collate, options):
    (plain, _), (module, source) = both_ways(collate, options)
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)
    assert source.stats.off is None
    # Of samples in batches of the same length: an entry serves no other length.
    assert source.stats.hits > (48 if collate is padded else 3 * 48)


class Embedded(Classifier):
    """A hook that runs on each batch."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, labels = batch
        return x.clone(), labels


def texts_of(module, cached, workers=0, **arguments):
    """Train on padded texts by the queue."""
    torch.manual_seed(0)
    batches = DataLoader(Texts(), 8, shuffle=True, collate_fn=padded, num_workers=workers)
    source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
    callbacks = arguments.pop("callbacks", [])
    schedule = scripted({2: 1, 20: 2})
    fit(module, schedule, *callbacks, data=SelectiveBackprop(source), epochs=6, **arguments)
    return source


@pytest.mark.filterwarnings("ignore:cache. .* nearly all inputs of the last 20 batches differed")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Classifier, Embedded])
def test_padded_texts_are_collated_anew_as_without_the_cache(kind, workers):
    """Texts of one length in one batch and of another in the next are computed, not read."""
    modules = [kind(Transformer(dropout=0)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module, cached in zip(modules, (False, True), strict=True):
        texts_of(module, cached, workers)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-5)


@pytest.mark.filterwarnings("ignore:cache. .* nearly all inputs of the last 20 batches differed")
@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"staleness": 2}])
def test_a_padding_collate_function_draws_as_without_the_cache(options):
    def masking(samples):
        texts, labels = padded(samples)
        return torch.where((torch.rand(texts.shape) < 0.1) & (texts != 0), 19, texts), labels

    found = []
    for module, _ in both_ways(masking, options):
        found.append((module, torch.get_rng_state()))
    assert found[1][0].losses == pytest.approx(found[0][0].losses, rel=1e-5)
    assert found[0][1].equal(found[1][1])


def test_padded_texts_of_loaders_that_are_made_anew():
    modules = [Classifier(Transformer(dropout=0)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module, cached in zip(modules, (False, True), strict=True):
        texts_of(module, cached, reload_dataloaders_every_n_epochs=1)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-5)


HIDDEN = {}  # where the cache does not look


class Elsewhere(Dataset):
    """Its images are in a global variable, and the label tells which they are."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        image, label = HIDDEN["images"][index]
        return image + HIDDEN["version"], label


@pytest.mark.filterwarnings("ignore:cache. .* nearly all inputs of the last 20 batches differed")  # they do
@pytest.mark.parametrize("step", [22, 25])
def test_samples_loaded_before_a_change_verify_no_entry(step):
    """They wait in the queue, or were loaded ahead, while `invalidate` is called."""

    class Change(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == step:
                HIDDEN["version"] = 1.0
                if source is not None:
                    source.invalidate(range(10, 60))

    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        HIDDEN.update(images=images(96), version=0.0)
        module, batches = Classifier(ConvNet(dropout=0)), DataLoader(Elsewhere(), 8, shuffle=True)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else None
        data = SelectiveBackprop(source or batches, staleness=2)
        fit(module, scripted({3: 1, 12: 2}), Change(), data=data, epochs=6)
        found.append(module.losses)
    assert found[0] == found[1]


def test_padded_texts_resume_in_the_middle_of_an_epoch(tmp_path):
    whole = Classifier(Transformer(dropout=0))
    begun = copy.deepcopy(whole.state_dict())
    texts_of(whole, True, callbacks=[Checkpoints(tmp_path)])
    for step in (8, 12, 17):
        resumed = Classifier(Transformer(dropout=0))
        resumed.load_state_dict(begun)
        texts_of(resumed, True, ckpt_path=tmp_path / f"{step}")
        assert resumed.losses == pytest.approx(whole.losses[step:], rel=1e-5)


def without_and_with_cache(kind, schedule, epochs, **options):
    """Two modules of a kind, trained on the same images."""
    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        module, source = kind(ConvNet(dropout=0)), loader(images(48))
        source = FrozenPrefixCache(source, min_free_bytes=0) if cached else source
        fit(module, scripted(schedule), data=SelectiveBackprop(source, **options), epochs=epochs)
        found.append(module)
    return found


def test_behind_hooks_for_batches_samples_are_those_of_the_hooks():
    class Brighter(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, labels = batch
            return x + torch.rand(1), labels

    assert equal(*without_and_with_cache(Brighter, {3: 1}, epochs=3))


class Attention(nn.Module):
    """Each pixel attends to all; `nn.MultiheadAttention` has another kernel in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


class OfPixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x.squeeze(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("options", [{}, pytest.param({"mode": "in_batch"}, marks=pytest.mark.slow)])
def test_what_scoring_computes_is_what_training_would(options):
    torch.manual_seed(0)
    source = FrozenPrefixCache(loader(images(96), shuffle=True), min_free_bytes=0)
    fit(Classifier(OfPixels()), scripted({1: 2}), data=SelectiveBackprop(source, **options), epochs=40)
    assert source.stats.off is None
    assert source.stats.hits > 2000
    assert source.stats.wrong == 0  # every 200th batch is compared


@pytest.mark.parametrize("schedule", [{}, {3: 1}])
def test_stale_losses_under_hooks_that_draw(schedule):
    class Drawing(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            x, labels = batch
            return x + torch.randn(1), labels

    assert equal(*without_and_with_cache(Drawing, schedule, epochs=4, staleness=1))


def test_stale_losses_need_samples_in_order_here_too():
    def backwards(samples):
        return default_collate(samples[::-1])

    source = FrozenPrefixCache(loader(images(48), collate_fn=backwards), min_free_bytes=0)
    with pytest.raises(UnsupportedError, match="changes the order of the samples"):
        fit(Classifier(), scripted({}), data=SelectiveBackprop(source, staleness=1))


@pytest.mark.parametrize("options", [{"replacement": True, "num_samples": 96}, {"num_samples": 288}])
def test_a_sampler_that_draws_in_between_is_not_read_ahead(options):
    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        data, module = images(96), Classifier(ConvNet(dropout=0))
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5), **options)
        batches = DataLoader(data, 8, sampler=sampler)
        source = FrozenPrefixCache(batches, min_free_bytes=0) if cached else batches
        fit(module, scripted({3: 1}), data=source, epochs=3, limit_train_batches=6)
        found.append(module)
    assert found[0].losses == found[1].losses
