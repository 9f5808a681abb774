"""The training loader."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_egeria import PrefixFreezing
from lightning_egeria.errors import ArgumentError, RowsError
from lightning_egeria.methods.selecting.scoring import Scorer
from support.models import After, equal, images, loader
from support.selecting import Checkpoints, Indexed, Noting, kept_by_a_loop, trained


@pytest.fixture
def scores(monkeypatch):
    """Losses of each scored batch."""
    found, losses = [], Scorer.losses

    def noted(*arguments):
        found.append(losses(*arguments))
        return found[-1]

    monkeypatch.setattr(Scorer, "losses", noted)
    return found


@pytest.mark.parametrize("beta", [0.5, 2])
def test_a_plain_loop_selects_the_same(scores, beta):
    module, _, data = trained(images(44), epochs=3, beta=beta, history=20, seed=5)
    batches = [list(range(at, min(at + 8, 44))) for at in range(0, 44, 8)]
    numbers = [
        number
        for epoch in (1, 2)
        for place, ids in enumerate(batches)
        for number in np.random.default_rng([5, 0, epoch, place]).random(len(ids))
    ]
    kept = kept_by_a_loop(scores, numbers, beta, 20)
    expected = [one for one, is_kept in zip([*range(44)] * 2, kept, strict=True) if is_kept]
    assert module.ids[:6] == batches
    assert [one for batch in module.ids[6:] for one in batch] == expected
    assert data.selection.scored == 88
    assert data.selection.trained == 44 + len(expected)


def test_full_batches_and_no_tiny_one():
    module, trainer, _ = trained(images(100), epochs=4, beta=1)
    sizes = [len(batch) for batch in module.ids]
    assert sizes[:13] == [8] * 12 + [4]
    assert min(sizes[13:]) >= 2
    assert trainer.global_step == len(sizes)


@pytest.mark.parametrize("options", [{"beta": 5, "start": 0.3, "end": 0.35}, {"beta": 5, "full_every": 2}])
def test_a_single_sample_is_no_batch(options):
    for seed in range(6):
        module, _, data = trained(images(32), epochs=4, seed=seed, **options)
        assert min(map(len, module.ids)) > 1
        assert data.selection.trained == sum(map(len, module.ids))


def test_a_small_last_batch_keeps_two_samples():
    module, _, _ = trained(images(18), epochs=2, mode="in_batch", share=0.5)
    assert [len(batch) for batch in module.ids] == [8, 8, 2, 4, 4, 2]


def test_in_batch_keeps_a_fixed_number():
    module, trainer, _ = trained(epochs=3, mode="in_batch", share=0.4)
    assert [len(batch) for batch in module.ids] == [8] * 5 + [3] * 10
    assert trainer.global_step == 15
    assert all(set(batch) <= set(range(8 * (at % 5), 8 * (at % 5) + 8)) for at, batch in enumerate(module.ids))


def test_without_a_preference_nothing_is_scored(scores):
    module, _, data = trained(epochs=3, mode="in_batch", share=0.5, beta=0)
    assert scores == []
    assert data.selection.scored == 0
    assert {len(batch) for batch in module.ids[5:]} == {4}


class Shuffled(Noting):
    """Each sample is its own loss, whatever the order."""

    def training_step(self, batch, batch_idx):
        x, _, ids = batch
        self.ids.append(ids.tolist())
        return torch.nn.functional.mse_loss(self.net(x).mean(1) * 0 + ids.float(), torch.zeros(len(ids)))


def test_stale_losses_belong_to_their_samples(scores):
    """The loader shuffles. The paper's own code gives losses to the wrong samples."""
    module, _, data = trained(
        module=Shuffled(),
        batches=DataLoader(Indexed(), batch_size=8, shuffle=True),
        epochs=6,
        staleness=9,
        history=40,
    )
    assert data.losses.of(range(40)).tolist() == [float(number**2) for number in range(40)]
    assert scores == []  # the first epoch has given all losses
    counts = np.bincount([one for batch in module.ids[5:] for one in batch], minlength=40)
    assert counts[0] == 0
    assert counts[30:].mean() > counts[:10].mean()


def test_stale_losses_are_scored_again():
    _, _, data = trained(epochs=4, staleness=1)
    by_epoch = {epoch: scored for epoch, _, scored, _ in data.selection.epochs}
    assert by_epoch[0] == by_epoch[1] == 0
    left = 40 - data.selection.epochs[1][3]
    # Those that were not trained in the epoch before, in each batch up to a multiple of a quarter: of two.
    assert 0 < left <= by_epoch[2] <= left + 5 < 40
    assert by_epoch[2] % 2 == 0


def test_window_and_whole_batches():
    module, _, data = trained(images(80), epochs=4, start=0.5, end=0.75, full_every=5)
    seen = [trained_ for _, _, _, trained_ in data.selection.epochs]
    assert seen[0] == seen[1] == seen[3] == 80
    assert seen[2] < 80
    assert list(range(32, 40)) in module.ids[20:-10]


class Texts(Indexed):
    def __getitem__(self, index):
        x, label, _ = super().__getitem__(index)
        return {"x": x, "label": label, "extra": {"name": f"sample {index}", "index": index}}


class Reading(Noting):
    def training_step(self, batch, batch_idx):
        assert batch["extra"]["name"] == [f"sample {number}" for number in batch["extra"]["index"].tolist()]
        return super().training_step((batch["x"], batch["label"], batch["extra"]["index"]), batch_idx)


def test_nested_batches_stay_together():
    module, _, _ = trained(module=Reading(), batches=loader(Texts()), epochs=3)
    assert len(module.ids) > 6


class Stream(IterableDataset):
    def __init__(self, data=None):
        self.data = Indexed() if data is None else data

    def __iter__(self):
        yield from (self.data[index] for index in range(40))


def test_a_stream_without_length_ends_with_its_last_batch():
    module, trainer, _ = trained(batches=DataLoader(Stream(), 8), epochs=3)
    assert trainer.current_epoch == 3
    assert len(module.ids[0]) == 8


@pytest.mark.parametrize("options", [{}, {"mode": "in_batch"}])
def test_a_stream_is_resumed_at_any_step(tmp_path, options):
    """Lightning reads a batch of a loader without a length ahead, unless it is asked not to."""
    whole, trainer, data = trained(None, Checkpoints(tmp_path), batches=DataLoader(Stream(), 8), **options)
    for step in range(1, trainer.global_step):
        resumed, _, again = trained(batches=DataLoader(Stream(), 8), ckpt_path=tmp_path / f"{step}", **options)
        assert resumed.ids == whole.ids[step:]
        assert resumed.losses == whole.losses[step:]
        assert again.selection.epochs == data.selection.epochs


class Compares(PrefixFreezing):
    """Looks at every fourth batch."""

    def __init__(self):
        super().__init__()
        self.next = 0

    def choose_depth(self, step):
        self.next = step

    def will_compare(self, batches_ahead):
        return (self.next + batches_ahead - 1) % 4 == 0


@pytest.mark.parametrize("batches", [lambda: loader(Indexed(images(96))), lambda: DataLoader(Stream(), 8)])
@pytest.mark.parametrize("options", [{"beta": 0.4}, {"mode": "in_batch"}])
def test_batches_that_are_compared_are_whole(batches, options):
    epochs = []
    look = After(lambda trainer, _: epochs.append(trainer.current_epoch))
    module, _, _ = trained(None, Compares(), look, batches=batches(), epochs=4, **options)
    compared, at_the_end = 0, 0
    for at in range(4, len(epochs), 4):
        ids = module.ids[at]
        if ids == list(range(ids[0], ids[0] + len(ids))):
            compared += 1
        else:  # what is left in the queue
            assert "beta" in options
            assert epochs[at] < (*epochs, 4, 4)[at + 2]
            at_the_end += 1
    assert compared > at_the_end


class Iterating:
    def __iter__(self):
        return iter(loader(Indexed()))


def test_history_must_hold_a_batch():
    with pytest.raises(ArgumentError, match="history must be at least the batch size, got 7 and 8"):
        trained(history=7)
    with pytest.raises(ArgumentError, match="got 7 and a batch of 8 samples"):
        trained(history=7, batches=Iterating())


def padded(samples, length=None):
    """Wider for some first samples than for others."""
    length = 3 + int(samples[0]["index"]) % 3 if length is None else length
    x = torch.stack([torch.nn.functional.pad(one.pop("x"), (0, length)) for one in samples])
    return x, *(torch.tensor([one[name] for one in samples]) for name in ("label", "index"))


def of_one_shape(samples):
    return padded(samples, 5)


class Words(Indexed):
    def __getitem__(self, index):
        x, label, _ = super().__getitem__(index)
        return {"x": x, "text": "word " * (1 + index % 4), "label": label, "index": index}


class Averaging(Noting):
    """Leaves the padding out."""

    def training_step(self, batch, batch_idx):
        x, labels, ids = batch
        return super().training_step((x[..., :8], labels, ids), batch_idx)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"mode": "in_batch"}])
def test_padded_samples_are_those_of_one_shape(options, workers):
    found = []
    for collate in (padded, of_one_shape):
        torch.manual_seed(3)
        settings = {"num_workers": workers, "persistent_workers": workers > 0}
        batches = DataLoader(Words(), 8, shuffle=True, collate_fn=collate, **settings)
        module, _, _ = trained(module=Averaging(), batches=batches, epochs=4, **options)
        found.append((module.ids, module.losses))
    assert found[0] == found[1]
    assert len(found[0][0]) > 8


class Unsized:
    """A batch sampler that does not tell its length, so batches are read one ahead."""

    def __iter__(self):
        return iter(torch.randperm(40).view(5, 8).tolist())


def test_padded_samples_of_batches_that_are_read_ahead():
    found = []
    for collate in (padded, of_one_shape):
        torch.manual_seed(3)
        batches = DataLoader(Words(), batch_sampler=Unsized(), collate_fn=collate)
        module, _, _ = trained(module=Averaging(), batches=batches, epochs=4)
        found.append((module.ids, module.losses))
    assert found[0] == found[1]
    assert len(found[0][0]) > 8


def test_padded_samples_in_the_queue_are_resumed(tmp_path):
    def run(*callbacks, **options):
        torch.manual_seed(3)
        batches = DataLoader(Words(), 8, shuffle=True, collate_fn=padded)
        return trained(None, *callbacks, module=Averaging(), batches=batches, epochs=4, **options)[0]

    whole = run(Checkpoints(tmp_path))
    for step in (6, 7, 9):
        resumed = run(ckpt_path=tmp_path / f"{step}")
        assert resumed.ids == whole.ids[step:]
        assert equal(resumed, whole)


def test_samples_of_other_shapes_are_refused_in_the_queue():
    def backwards(samples):
        return padded(sorted(samples, key=lambda sample: -sample["index"]))

    for batches in (loader(Words(), collate_fn=backwards), DataLoader(Stream(Words()), 8, collate_fn=padded)):
        module = Averaging()
        with pytest.raises(RowsError, match="cannot be joined"):
            trained(module=module, batches=batches)
        assert len(module.ids) < 3  # at once, not behind the first epoch
        module, _, _ = trained(module=Averaging(), batches=batches, mode="in_batch")
        assert len(module.ids) == 15


class Views(Indexed):
    """Two views of each sample."""

    def __getitem__(self, index):
        x, label, _ = super().__getitem__(index)
        return (x, x + 1), label, index


class OfViews(Noting):
    def training_step(self, batch, batch_idx):
        (x, other), labels, ids = batch
        assert other.equal(x + 1)
        return super().training_step((x, labels, ids), batch_idx)


class Boxed(Indexed):
    """Each sample has a list of as many numbers as a batch has samples."""

    def __getitem__(self, index):
        x, label, _ = super().__getitem__(index)
        return x, label, index, [index * 8 + at for at in range(8)]


def causal(samples):
    return *default_collate(samples), torch.ones(8, 8).tril()


class OfBoxes(Noting):
    def training_step(self, batch, batch_idx):
        x, labels, ids, boxes, *mask = batch
        assert torch.stack(boxes, 1).equal(ids[:, None] * 8 + torch.arange(8))
        assert all(one.equal(torch.ones(8, 8).tril()) for one in mask)
        return super().training_step((x, labels, ids), batch_idx)


@pytest.mark.parametrize("options", [{}, {"mode": "in_batch"}, {"staleness": 1}])
@pytest.mark.parametrize("collate", [default_collate, causal])
@pytest.mark.parametrize("workers", [0, 1])
def test_as_many_values_as_samples_are_no_samples(options, collate, workers):
    found = []
    for data, module, own in ((Boxed(images(42)), OfBoxes(), collate), (Indexed(images(42)), Noting(), None)):
        batches = loader(data, collate_fn=own, num_workers=workers)
        trained(module=module, batches=batches, epochs=3, **options)
        found.append((module.ids, module.losses))
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {"mode": "in_batch"}])
def test_samples_in_another_dimension_are_refused(options):
    def transposed(samples):
        x, *others = default_collate(samples)
        return x.movedim(0, 1), *others

    with pytest.raises(RowsError, match="the samples of a batch are in dimension 1"):
        trained(batches=loader(Indexed(), collate_fn=transposed), **options)


@pytest.mark.parametrize("options", [{}, {"mode": "in_batch"}, {"staleness": 1}])
def test_two_views_of_two_samples_are_no_list_of_samples(options):
    found = []
    for data, module in ((Views(images(42)), OfViews()), (Indexed(images(42)), Noting())):
        trained(module=module, batches=loader(data), epochs=4, **options)  # the last batch has two samples
        found.append((module.ids, module.losses))
    assert found[0] == found[1]


def test_workers_stop_and_the_loader_is_the_users():
    module, _, data = trained(epochs=2)
    assert type(data.train_dataloader()) is DataLoader
    assert len(module.ids) > 5
