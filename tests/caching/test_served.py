"""What the cache serves, and how it counts: programs that once went wrong."""

import itertools
import time

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_egeria import FrozenPrefixCache
from lightning_egeria.caching import policy
from support.caching import harness
from support.caching.parts import CLASSES, WIDTH, Chain, Validated, loader, vectors

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")


@pytest.fixture
def run(tmp_path):
    """A run with the cache."""
    torch.manual_seed(0)
    return harness.Run(True, tmp_path / "run")


@pytest.fixture(autouse=True)
def _nothing_is_counted():
    Counted.rows = 0


class Module(L.LightningModule):
    """Trains what of it is not frozen, with ``loss(module, x, y)``."""

    def __init__(self, loss, **parts):
        super().__init__()
        self.loss, self.parts = loss, nn.ModuleDict(parts)

    def training_step(self, batch, batch_idx):
        return self.loss(self.parts, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], 0.01)


def stats_after(folder, module, data, *callbacks, epochs=1):
    cached = FrozenPrefixCache(data, cache_dir=folder / "cache", min_free_bytes=0)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, callbacks=[*callbacks], **quiet)
    trainer.fit(module, datamodule=cached)
    return cached.stats


class Counted(nn.Linear):
    """Counts the rows that run through all of its kind, where that is no attribute of a frozen module."""

    rows = 0

    def forward(self, x):
        Counted.rows += len(x)
        return super().forward(x)


def frozen(module):
    return module.requires_grad_(False).eval()


def layers(*modules):
    return nn.Sequential(*modules)


def test_a_small_validation_set_is_served(run):
    """Lightning begins the loader before it puts the model into evaluation mode: what is planned ahead is lost."""
    net = Chain()
    net.a.eval()
    net.b.eval()
    run.fit(Validated(net), val=loader(shuffle=False), max_epochs=5)
    assert run.caches[-1].validation_stats.hits >= 24


def test_frozen_modules_may_train_and_validate_in_different_modes(run):
    """Those that are frozen and not in evaluation mode: in each pass their entries are dropped."""
    run.fit(Validated(), val=loader(batch_size=2, shuffle=False), max_epochs=5)
    assert run.caches[-1].validation_stats.hits > 24


def test_two_values_of_one_first_epoch_are_misses(tmp_path):
    """All frozen layers ran for all samples; the closing line says that some came from the cache."""
    first, second = (
        frozen(Counted(WIDTH, WIDTH)),
        frozen(layers(nn.Linear(WIDTH, 512), nn.Linear(512, 512), Counted(512, WIDTH))),
    )

    def loss(parts, x, y):
        a = parts["first"](x)
        return F.cross_entropy(parts["head"](a) + parts["other"](parts["second"](a)), y)

    heads = {name: nn.Linear(WIDTH, CLASSES) for name in ("head", "other")}
    found = stats_after(tmp_path, Module(loss, first=first, second=second, **heads), loader(), epochs=2)
    assert found.advanced == 0


class Deeper(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            module.parts["second"].requires_grad_(False)


def test_entries_that_others_are_computed_from_are_not_rejected(tmp_path):
    torch.manual_seed(0)
    first = frozen(layers(nn.Linear(WIDTH, 512), nn.Linear(512, 512), nn.Linear(512, WIDTH)))
    second = layers(nn.Linear(WIDTH, 512), nn.Linear(512, 512), nn.Linear(512, WIDTH)).eval()

    def loss(parts, x, y):
        return F.cross_entropy(parts["head"](parts["second"](parts["first"](x))), y)

    module = Module(loss, first=first, second=second, head=nn.Linear(WIDTH, CLASSES))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.01)
    found = stats_after(tmp_path, module, loader(), Deeper(), epochs=3)
    assert found.advanced > 0
    assert found.unused == 0


def test_rows_of_other_shapes_that_ran_are_no_hits(tmp_path):
    """The first call with another shape runs at once, and is not counted."""
    texts = [torch.randint(1, 9, (4 + number // 6,)) for number in range(24)]

    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return texts[index], index % CLASSES

    backbone = frozen(layers(nn.Embedding(10, 16), nn.Linear(16, 256), nn.Linear(256, 16), Counted(16, 16)))
    module = Module(
        lambda parts, x, y: F.cross_entropy(parts["head"](parts["backbone"](x).sum(1)), y),
        backbone=backbone,
        head=nn.Linear(16, CLASSES),
    )
    data = loader(Texts(), shuffle=False)
    found = stats_after(tmp_path, module, data, epochs=2)
    assert Counted.rows >= 24
    assert found.hits <= 24  # of the second epoch


def test_a_frozen_front_before_dropout_is_served(tmp_path):
    """The value behind both is asked for, whose mask is another one each time; the front alone is the same."""
    module = Module(
        lambda parts, x, y: F.cross_entropy(parts["head"](parts["behind"](parts["drop"](parts["front"](x)))), y),
        front=frozen(layers(Counted(WIDTH, 1024), nn.Linear(1024, 1024), nn.Linear(1024, WIDTH))),
        drop=nn.Dropout(0.5),
        behind=frozen(nn.Linear(WIDTH, WIDTH)),
        head=nn.Linear(WIDTH, CLASSES),
    )
    stats_after(tmp_path, module, loader(vectors()), epochs=4)
    assert Counted.rows <= 24 * 2 + 12  # the probe, and the steps until its modules are known to stay as they are


def test_values_are_counted(tmp_path):
    backbone = frozen(layers(nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)))
    module = Module(
        lambda parts, x, y: F.cross_entropy(parts["head"](parts["backbone"](x)), y),
        backbone=backbone,
        head=nn.Linear(WIDTH, CLASSES),
    )
    seen = []

    class Looks(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(trainer.datamodule.stats.values)

    stats_after(tmp_path, module, loader(), Looks(), epochs=2)
    assert seen == [1, 1]


BEHIND = {
    "dropout in the head": lambda y: F.dropout(y, 0.5),
    "noise": lambda y: y + torch.randn(len(y), WIDTH),
    "mean over the batch": lambda y: y - y.mean(0),
    "mixed in the step": lambda y: torch.lerp(y, y.flip(0), torch.rand(())),
}


@pytest.mark.filterwarnings("ignore:cache. the cache of training is off")
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_a_backbone_is_served_whatever_the_step_does_with_its_output(tmp_path, behind):
    """The operation behind it is recorded too, and the value behind that is no function of a sample: the output is."""
    module = Module(
        lambda parts, x, y: F.cross_entropy(parts["head"](behind(parts["backbone"](x))), y),
        backbone=frozen(layers(Counted(WIDTH, 1024), nn.Linear(1024, 1024), nn.Linear(1024, WIDTH))),
        head=nn.Linear(WIDTH, CLASSES),
    )
    stats_after(tmp_path, module, loader(vectors()), epochs=4)
    assert Counted.rows <= 24 * 2 + 18  # the probe tries the value behind first


@pytest.mark.parametrize("reads", [False, True])
def test_a_head_that_changes_its_input_in_place(tmp_path, reads):
    """As in a plain run, everything that holds the features sees the change."""

    def train(cached):
        torch.manual_seed(0)
        head = layers(nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES))

        def loss(parts, x, y):
            features = parts["backbone"](x)
            logits = parts["head"](features)
            return F.cross_entropy(logits + features[:, :CLASSES] * 2 if reads else logits, y)

        module = Module(loss, backbone=frozen(layers(nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH))), head=head)
        losses = []
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
        L.seed_everything(1, verbose=False)
        data = loader(shuffle=False)
        if cached:
            return stats_after(tmp_path, module, data, epochs=4).hits, losses
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        L.Trainer(max_epochs=4, accelerator="cpu", logger=False, **quiet).fit(module, data)
        return 0, losses

    hits, losses = train(True)
    assert losses == train(False)[1]
    assert hits >= 24


class Slow(Counted):
    """Takes as long for each batch."""

    SECONDS = 0.1

    def forward(self, x):
        time.sleep(self.SECONDS)
        return super().forward(x)


def test_seconds_saved_are_those_of_runs_that_did_not_happen(tmp_path, written_at_once):
    """Probes, verification, and whatever else the cache does are taken off."""
    epochs, batches = 4, 4
    module = Module(lambda parts, x, y: F.cross_entropy(parts.head(parts.slow(x)), y), slow=frozen(Slow(WIDTH, 8)))
    module.parts["head"] = nn.Linear(8, CLASSES)
    stats = stats_after(tmp_path, module, loader(vectors(), batch_size=6), epochs=epochs)
    saved = (epochs * batches - Counted.rows / 6) * Slow.SECONDS
    assert stats.hits > 0
    assert 0.6 * saved < stats.seconds_saved < 1.1 * saved


class Texts(torch.utils.data.Dataset):
    """Texts of 3 to 62 tokens."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 9, (3 + 37 * index % 60,), generator=generator), index % CLASSES


def padded(samples):
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


def pooled(parts, x, y):
    return F.cross_entropy(parts["head"](parts["backbone"](x).sum(1)), y)


class Validating(Module):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(self.parts, *batch))


def text_run(folder, cached, **options):
    torch.manual_seed(0)
    backbone = frozen(layers(nn.Embedding(10, 16), nn.Linear(16, 256), nn.Linear(256, 16), Counted(16, 16)))
    module = Validating(pooled, backbone=backbone, head=nn.Linear(16, CLASSES))
    train = loader(Texts(), 4, collate_fn=padded)
    data = L.LightningDataModule.from_datasets(Texts())
    data.train_dataloader = lambda: train
    data.val_dataloader = lambda: loader(Texts(), 8, shuffle=False, collate_fn=padded)
    source = FrozenPrefixCache(data, cache_dir=folder / "cache", min_free_bytes=0) if cached else data
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_epochs=4, accelerator="cpu", logger=False, num_sanity_val_steps=0, **quiet, **options).fit(
        module, datamodule=source
    )
    return module, source


@pytest.mark.filterwarnings("ignore:cache. the cache of training is off")
def test_batches_that_are_padded_to_their_longest_text_stop_the_cache_within_one_epoch(tmp_path):
    plain, _ = text_run(tmp_path, cached=False)
    module, source = text_run(tmp_path, cached=True)
    assert source.stats.off == policy.PADDED
    assert source.stats.misses <= 96
    assert all(map(torch.equal, module.parameters(), plain.parameters()))


@pytest.mark.filterwarnings("ignore:cache. the cache of training is off")
def test_the_same_padded_batches_are_served_in_each_validation(tmp_path, written_at_once):
    """Each length has entries of its own; the first pass writes them."""
    _, source = text_run(tmp_path, cached=True)
    stats = source.validation_stats
    assert stats.off is None
    assert stats.misses == 96
    assert stats.hits >= 3 * 96 - 8  # the first batch is planned before the mode changes


def test_in_validation_nothing_behind_what_trains_is_kept(tmp_path, written_at_once):
    """There no gradient tells it: each entry would be one of other weights."""

    class Adapted(Validating):
        def __init__(self):
            first, second = (frozen(layers(nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH))) for _ in range(2))
            super().__init__(self.adapted, first=first, second=second, adapter=nn.Linear(WIDTH, WIDTH))
            self.parts["head"] = nn.Linear(WIDTH, CLASSES)

        @staticmethod
        def adapted(parts, x, y):
            x = parts["first"](x)
            return F.cross_entropy(parts["head"](parts["second"](x + parts["adapter"](x))), y)

    torch.manual_seed(0)
    data = L.LightningDataModule()
    data.train_dataloader, data.val_dataloader = loader, lambda: loader(shuffle=False)
    source = FrozenPrefixCache(data, cache_dir=tmp_path / "cache", min_free_bytes=0)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_epochs=3, accelerator="cpu", logger=False, num_sanity_val_steps=0, **quiet).fit(
        Adapted(), datamodule=source
    )
    stats = source.validation_stats
    assert (stats.values, stats.unused) == (1, 0)
    assert stats.hits >= 2 * 24 - 6  # one batch of each pass is planned before the mode changes


@pytest.mark.filterwarnings("ignore:cache. the cache of training is off")
def test_what_follows_from_statistics_that_training_changes_is_not_kept_in_validation(tmp_path, written_at_once):
    """Each pass would drop what the one before has written, and warn that frozen modules keep changing."""

    def fitted(cached):
        torch.manual_seed(0)
        net = frozen(nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, WIDTH)))
        module = Validated(layers(net, nn.Linear(WIDTH, CLASSES)))
        module.train()
        data = L.LightningDataModule()
        data.train_dataloader, data.val_dataloader = loader, lambda: loader(shuffle=False)
        source = FrozenPrefixCache(data, cache_dir=tmp_path / "cache", min_free_bytes=0) if cached else data
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(max_epochs=6, accelerator="cpu", logger=False, **quiet)
        trainer.fit(module, datamodule=source)
        return trainer.callback_metrics, module, source

    metrics, plain, _ = fitted(False)
    found, module, source = fitted(True)
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
    assert metrics == found
    assert source.validation_stats.wrong == source.validation_stats.unused == 0
    assert source.validation_stats.off != "the frozen layers keep changing"


def test_samples_of_which_none_came_from_the_cache_have_saved_nothing(tmp_path, written_at_once):
    """In the second epoch the step calls no frozen module, which is no work of the cache."""
    steps = itertools.count()

    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.05)
            return super().forward(x)

    def loss(parts, x, y):
        x = parts["net"](x) if next(steps) < len(loader()) else x
        return F.cross_entropy(parts["head"](x), y)

    module = Module(loss, net=frozen(Slow(WIDTH, WIDTH)), head=nn.Linear(WIDTH, CLASSES))
    stats = stats_after(tmp_path, module, loader(), epochs=2)
    assert stats.hits == stats.advanced == 0
    assert stats.seconds_saved <= 0
