"""The data module around the user's own."""

import copy
import pickle
import warnings
from itertools import chain

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_egeria import FrozenPrefixCache, SelectiveBackprop
from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.errors import ArgumentError, PerSampleLossError, RowsError, UnsupportedError
from support.models import After, Classifier, ManualSteps, equal, fit, images, loader
from support.selecting import Checkpoints, Indexed, Noting, trained


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"beta": -1}, "beta must be a finite number of at least 0, got -1"),
        ({"beta": float("nan")}, "beta must be a finite number"),
        ({"share": 0, "mode": "in_batch"}, r"share must be a number in \(0, 1\], got 0"),
        ({"share": "half", "mode": "in_batch"}, r"share must be a number in \(0, 1\], got 'half'"),
        ({"share": 0.5}, "share is for mode='in_batch'"),
        ({"mode": "batch"}, "mode must be one of 'queue', 'in_batch', got 'batch'"),
        ({"schedule": "epoch"}, "schedule must be one of 'seen', 'used', got 'epoch'"),
        ({"schedule": "used", "mode": "in_batch"}, "schedule='used' is for mode='queue'"),
        ({"history": 0}, "history must be an integer of at least 1, got 0"),
        ({"staleness": 1.5}, "staleness must be an integer of at least 0, got 1.5"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"beta": "1"}, "beta must be a finite number of at least 0, got '1'"),
        ({"per_sample_loss": 3}, "per_sample_loss must be a function, got 3"),
        ({"start": "0.5"}, "start and end must be shares"),
        ({"start": 0.5, "end": 0.2}, "start and end must be shares of the run"),
        ({"full_every": 1.5}, "full_every must be an integer of at least 0, got 1.5"),
    ],
)
def test_wrong_arguments_are_named(wrong, words):
    with pytest.raises(ArgumentError, match=words):
        SelectiveBackprop(loader(), **wrong)


@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_without_beta_it_trains_bit_for_bit_as_without(mode):
    plain, module = Classifier(), Classifier()
    fit(plain)
    fit(module, data=SelectiveBackprop(loader(), beta=0, mode=mode))
    assert equal(plain, module)
    assert plain.losses == module.losses


def momentum_of(trainer):
    state = trainer.optimizers[0].state_dict()["state"]
    return digest({str(number): one["momentum_buffer"] for number, one in state.items()})


@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_scoring_moves_nothing(mode):
    """Every sample is kept, so scoring is all that may change buffers, dropout and the state of the optimizer."""

    class All(SelectiveBackprop):
        def make_rule(self):
            rule = super().make_rule()
            score = rule.probabilities
            rule.probabilities = lambda losses: score(losses) * 0 + 1
            return rule

    plain, module, states = Noting(), Noting(), []
    look = After(lambda trainer, _: states.append(momentum_of(trainer)))
    fit(plain, look, data=loader(Indexed()))
    fit(module, look, data=All(loader(Indexed()), mode=mode, share=1 if mode == "in_batch" else None))
    if mode == "in_batch":
        assert equal(plain, module)
        assert states[: len(states) // 2] == states[len(states) // 2 :]
    else:  # the queue cuts other batches
        assert module.losses[:5] == plain.losses[:5]
        assert sorted(chain(*module.ids[5:])) == sorted(chain(*plain.ids[5:]))


class Saves(L.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (3, {}),
        (10, {}),
        (10, {"staleness": 1}),
        (20, {"mode": "in_batch"}),
        (18, {"start": 0.5, "full_every": 3}),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_resumed_in_an_epoch_it_selects_the_same(tmp_path, step, options, shuffle):
    def batches():
        return DataLoader(Indexed(images(60)), batch_size=8, shuffle=shuffle)

    path = tmp_path / "checkpoint"
    whole, trainer, data = trained(None, Saves(path, step), batches=batches(), epochs=4, **options)
    other = Noting()
    resumed, again, _ = trained(module=other, batches=batches(), epochs=4, ckpt_path=path, **options)
    assert again.global_step == trainer.global_step
    assert resumed.ids == whole.ids[step:]
    assert resumed.losses == whole.losses[step:]  # dropout too
    assert equal(resumed, whole)
    torch.load(path, weights_only=True)
    assert data.selection.seen == 240


def test_resumed_at_any_step_it_goes_on(tmp_path):
    """The last batch of an epoch too: Lightning expects more of them."""

    def run(module, *callbacks, **options):
        data = SelectiveBackprop(DataLoader(Indexed(), 8, shuffle=True), staleness=1, val_dataloaders=loader(Indexed()))
        return fit(module, *callbacks, data=data, **options)

    class Tested(Noting):
        def validation_step(self, batch, batch_idx):
            self.ids.append("validation")

    whole, steps = Tested(), []
    trainer = run(whole, Checkpoints(tmp_path), After(lambda *_: steps.append(len(whole.ids))))
    for step in range(1, trainer.global_step):
        resumed = Tested()
        run(resumed, ckpt_path=tmp_path / f"{step}", seed=7)
        # Lightning does not repeat a validation that a checkpoint was written in front of.
        later = whole.ids[steps[step - 1] :]
        assert resumed.ids == later[next(at for at, one in enumerate(later) if one != "validation") :]
        assert equal(resumed, whole)


class Drawn(Indexed):
    def __getitem__(self, index):
        x, *others = super().__getitem__(index)
        return x + torch.rand(1), *others


class DrawingHook(Noting):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * torch.rand(len(batch[0]), 1, 1, 1), *batch[1:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"start": 0.4, "end": 0.7}, {"staleness": 1}])
def test_a_resumed_run_draws_and_counts_the_same(tmp_path, options, workers):
    def run(module, *callbacks, ckpt_path=None):
        batches = DataLoader(Drawn(), 8, shuffle=True, num_workers=workers)
        return trained(None, *callbacks, module=module, batches=batches, ckpt_path=ckpt_path, epochs=4, **options)

    whole, trainer, data = run(DrawingHook(), Checkpoints(tmp_path))
    for step in range(1, trainer.global_step, 1 + 3 * workers):
        resumed, _, again = run(DrawingHook(), ckpt_path=tmp_path / f"{step}")
        assert resumed.losses == whole.losses[step:]
        assert again.selection.epochs == data.selection.epochs


def test_resumed_at_the_end_of_an_epoch_it_resumes_again(tmp_path):
    """Lightning leaves the epoch behind such a checkpoint out of its counters."""

    def run(module, *callbacks, **options):
        data = SelectiveBackprop(DataLoader(Indexed(), 8, shuffle=True), mode="in_batch")
        return fit(module, *callbacks, data=data, epochs=4, **options)

    whole = Noting()
    steps = run(whole, Checkpoints(tmp_path)).global_step // 4
    (tmp_path / "again").mkdir()
    run(Noting(), Checkpoints(tmp_path / "again"), ckpt_path=tmp_path / f"{steps}")
    resumed = Noting()
    run(resumed, ckpt_path=tmp_path / "again" / f"{2 * steps + 1}")
    assert resumed.ids == whole.ids[2 * steps + 1 :]
    assert equal(resumed, whole)


class HookedModel(Noting):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, labels, ids = batch
        return x * 2 + torch.rand(1), labels, ids


class HookedData(L.LightningDataModule):
    def train_dataloader(self):
        return loader(Indexed())

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 3, *batch[1:]


def test_hooks_run_once_and_without_a_warning(monkeypatch):
    monkeypatch.setattr(data_connector, "warning_cache", WarningCache())
    calls, model = [], HookedModel()
    model.on_after_batch_transfer = lambda batch, number: calls.append(len(batch[2])) or batch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*LeafSpec|.*srun|.*many workers")
        _, _, data = trained(module=model, mode="in_batch")
    assert len(calls) == 15 + 2  # and in the check of the first two batches
    sizes = []
    with pytest.warns(UserWarning, match="You have overridden `on_after_batch_transfer` in both"):
        fit(HookedModel(), data=SelectiveBackprop(HookedData(), per_sample_loss=_sizes(sizes)))
    assert set(sizes) == {8}
    assert data.selection.seen == 120


def _sizes(seen):
    def loss(module, batch):
        seen.append(len(batch[0]))
        assert batch[0].abs().max() > 5  # three times what the data are
        return batch[2].float()

    return loss


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Indexed()[index] for index in range(40))


class Manual(ManualSteps, Noting):
    pass


def cross_entropies(module, batch):
    return F.cross_entropy(module.net(batch[0]), batch[1], reduction="none")


def test_manual_optimization_needs_a_function():
    with pytest.raises(UnsupportedError, match=r"with manual optimization .* Pass per_sample_loss=function"):
        trained(module=Manual(), mode="in_batch")
    module, trainer, _ = trained(module=Manual(), mode="in_batch", per_sample_loss=cross_entropies)
    assert trainer.global_step == 15
    assert {len(batch) for batch in module.ids[5:]} == {4}
    automatic, _, _ = trained(mode="in_batch")
    assert automatic.ids == module.ids


class FromIterator(Noting):
    def training_step(self, dataloader_iter):
        raise AssertionError


class Mixed(Noting):
    """Samples are mixed in the step, so its loss is not one of samples."""

    def training_step(self, batch, batch_idx):
        x, labels, _ = batch
        logits = self.net(0.7 * x + 0.3 * x.flip(0))
        return (0.7 * F.cross_entropy(logits, labels, reduction="none")).mean() + 0.3 * logits.logsumexp(1).mean()


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_unsupported_runs_are_refused_at_the_start():
    with pytest.raises(UnsupportedError, match="selective backprop does not run with dataloader_iter"):
        trained(module=FromIterator())
    with pytest.raises(UnsupportedError, match="needs the id of each sample, and a DataLoader over Stream"):
        trained(batches=DataLoader(Stream(), 8), staleness=1)
    with pytest.raises(UnsupportedError, match="needs one training loader, got a dict"):
        trained(batches={"a": loader(), "b": loader()})
    with pytest.raises(UnsupportedError, match=r"its length is unknown\. Pass max_epochs"):
        trained(epochs=-1, start=0.5)
    with pytest.raises(UnsupportedError, match=r"inside another wrapper\. Swap them"):
        fit(Noting(), data=FrozenPrefixCache(SelectiveBackprop(loader(Indexed()))))
    module = Mixed()
    with pytest.raises(PerSampleLossError, match="per_sample_loss=function"):
        trained(module=module)
    assert module.losses == []  # before the first step


class OfTheUser:
    def __init__(self, samples):
        self.x, self.y = torch.stack([x for x, *_ in samples]), torch.tensor([y for _, y, _ in samples])


class InTraining(Noting):
    def training_step(self, batch, batch_idx):
        assert self.training
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_selected_is_known_before_the_first_step():
    module = Noting()
    with pytest.raises(RowsError, match="no part of a batch of type OfTheUser has 8 rows"):
        trained(module=module, batches=loader(Indexed(), collate_fn=OfTheUser))
    assert module.losses == []
    with pytest.raises(AssertionError) as raised:
        trained(module=InTraining())
    assert "ran this training step in evaluation mode" in raised.value.__notes__[0]


class Reads(L.Callback):
    """Goes through the training data in between, as a progress report or a look at embeddings does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            assert len(list(trainer.train_dataloader)) == 5
            assert len(list(trainer.datamodule.train_dataloader())) == 5


def test_other_readers_of_the_data_get_all_of_it():
    alone, _, _ = trained(module=Noting(dropout=0))
    read, _, data = trained(None, Reads(), module=Noting(dropout=0))
    assert read.ids == alone.ids
    assert data.selection.seen == 120


def test_a_run_without_selection_says_so():
    with pytest.warns(UserWarning, match="nothing is selected: the first epoch trains on all samples"):
        _, _, data = trained(epochs=1)
    assert data.selection.off == "the first epoch trains on all samples, and max_epochs is 1"
    data = SelectiveBackprop(loader(Indexed()))
    fit(Noting(), data=data, fast_dev_run=True, max_epochs=None, default_root_dir=None)
    assert data.selection.off == "fast_dev_run"


@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_mixed_precision_and_an_object_of_a_loss(mode):
    class Smoothed(Noting):
        def training_step(self, batch, batch_idx):
            self.ids.append(batch[2].tolist())
            criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
            return criterion(self.net(batch[0]), batch[1]) + 0.1 * F.mse_loss(
                self.net(batch[0]), torch.zeros(len(batch[0]), 3)
            )

    module, _, data = trained(module=Smoothed(), mode=mode, precision="bf16-mixed")
    assert data.selection.scored == 80
    assert len(module.ids) > 6


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_a_compiled_network_selects_the_same(mode):
    plain, _, _ = trained(module=Noting(dropout=0), mode=mode)
    module = Noting(dropout=0)
    module.net = torch.compile(module.net, backend="eager")
    trained(module=module, mode=mode)
    assert module.ids == plain.ids
    assert module.losses == plain.losses


def test_a_used_data_module_can_be_copied_and_used_again():
    data = SelectiveBackprop(loader(Indexed()))
    first, second, third = Noting(), Noting(), Noting()
    fit(first, data=data)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(data)))
    fit(second, data=data)
    fit(third, data=copied)
    assert first.ids == second.ids == third.ids
    assert data.selection.seen == copied.selection.seen == 120


def test_names_are_those_of_the_paper():
    data = SelectiveBackprop(loader(), beta=2)
    assert (data.beta, data.history, data.share) == (2, 1024, None)
    assert SelectiveBackprop(loader(), beta=3, mode="in_batch").share == 0.25
