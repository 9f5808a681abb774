"""The cache follows the frozen prefix, whatever becomes of it."""

import pytest
import torch
from programs import harness
from programs.parts import Classifier, ConvNet, Net, Samples, Validated, data_of, images, loader, on
from torch import nn

from lightning_egeria.stores.background import WriteBehind

LATER = {2: 1, 8: 2}


def settling(momentum=0.01):
    net = Net()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.momentum = momentum
    return Classifier(net)


def stats_of(run, number=-1):
    return run.caches[number].stats


def note_stats(run, seen):
    """A callback that keeps depth and reason after each step."""

    def look(trainer, *_):
        if run.cached:
            seen[trainer.global_step] = (stats_of(run).depth, stats_of(run).off)

    return on(on_train_batch_end=look)


@pytest.mark.parametrize(("schedule", "depth"), [({2: 2}, 2), ({2: 1, 50: 2}, 2), ({2: 2, 20: 0, 30: 1}, 1)])
def test_statistics_that_settle_are_waited_for(compare, schedule, depth):
    """Batch normalisation with a low momentum trains for 40 more steps."""
    seen = {}

    def program(run):
        run.fit(settling(), None, note_stats(run, seen), schedule=schedule, max_epochs=26)

    run = compare(program)
    last = max(schedule)
    assert seen[4] == (0, "running statistics still settle")
    assert seen[last + 38][0] < depth
    assert (stats_of(run).depth, stats_of(run).off) == (depth, None)


def test_deeper_freeze_advances_entries(compare):
    run = compare(lambda run: run.fit(Classifier(), schedule=LATER, max_epochs=6))
    assert stats_of(run).advanced > 0
    assert stats_of(run).hits > 48
    assert len(list(run.cache_dir.iterdir())) == 1  # the shallower store is gone once all is advanced


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_unfreezing_removes_the_stores(compare, workers):
    def program(run):
        data = loader(num_workers=workers)
        run.fit(Validated(), data, val=loader(shuffle=False), schedule={2: 2, 14: 0}, max_epochs=5)

    run = compare(program)
    assert stats_of(run).hits > 0
    assert stats_of(run).off == "nothing is frozen"
    assert list(run.cache_dir.iterdir()) == []


def test_nothing_frozen_changes_nothing(compare):
    run = compare(lambda run: run.fit(Classifier(), schedule={}), served=None, freezes=False)
    assert stats_of(run).off == "nothing is frozen"
    assert run.messages == []


def test_dropout_in_the_front_is_told_once(compare, caplog):
    def program(run):
        caplog.clear()
        run.fit(Classifier(Net(dropout=0.3)), schedule={2: 1, 8: 2})

    with caplog.at_level("INFO"):
        compare(program)
    assert caplog.text.count("dropout in frozen layers, such as 'net.a.3', is off") == 1


class Dropping(nn.Module):
    """Drops whole samples, as torchvision's StochasticDepth."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.3

    def forward(self, x):
        return nn.functional.dropout(x, self.drop_prob, self.training)


def test_other_layers_that_drop_are_told_too(compare, caplog):
    def program(run):
        net = Net()
        net.a.append(Dropping())
        run.fit(Classifier(net))

    with caplog.at_level("INFO"):
        compare(program)
    assert "dropout in frozen layers, such as 'net.a.4', is off" in caplog.text


def test_two_kinds_of_data_in_turn(compare):
    """A loader that is made anew gives larger images: another store."""

    def program(run):
        sizes = iter([6, 6, 8, 8, 8, 8, 8])
        data = data_of(train_dataloader=lambda: loader(images(size=next(sizes))))
        run.fit(Classifier(ConvNet()), data, reload_dataloaders_every_n_epochs=2, max_epochs=8)

    run = compare(program)
    assert stats_of(run).off is None
    assert len(list(run.cache_dir.iterdir())) == 2


def test_model_is_left_as_it_was(tmp_path):
    module = Classifier()
    run = harness.Run(True, tmp_path / "run")
    torch.manual_seed(0)
    run.fit(module)
    assert stats_of(run).hits > 0
    assert not any(vars(part).keys() & {"forward"} for part in module.modules())


LOADED = []


def _noted(data, index):
    LOADED.append(index)
    return data.x[index], data.y[index]


def test_samples_are_loaded_until_they_are_recorded(tmp_path, monkeypatch):
    """Inputs and labels come from the entries then."""
    submit = WriteBehind.submit

    def submit_and_wait(writer, *arguments):
        taken = submit(writer, *arguments)
        writer.finish()
        return taken

    monkeypatch.setattr(WriteBehind, "submit", submit_and_wait)
    LOADED.clear()
    run = harness.Run(True, tmp_path / "run")
    run.fit(Classifier(), loader(Samples(_noted)), max_epochs=6)
    assert len(LOADED) <= 3 * 24 + 2 * 6  # once more, to see whether they are random; later two in each epoch
