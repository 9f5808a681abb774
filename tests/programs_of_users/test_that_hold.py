"""Programs after public reports in which freezing did what it should; they have to go on doing so."""

import copy
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, StochasticWeightAveraging
from torch import nn

from lightning_egeria import FrozenPrefixCache
from support.user_programs import Blocks, Notes, SavesAt, run, same, scripted, vectors, weights_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class ByHand(L.Callback):
    """Freezes the first blocks as a careful user would."""

    def __init__(self, step=5, depth=2):
        self.step, self.depth = step, depth

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.step:
            module.net[: self.depth].requires_grad_(False).zero_grad(set_to_none=True)


def check(make, *others, schedule=None, **arguments):
    """The run with the callback is the run with layers frozen by hand, bit for bit, with a cache too."""
    hand, ours, cached = make(), make(), make()
    run(hand, ByHand(), *(other() for other in others), **arguments)
    for module, data in ((ours, None), (cached, FrozenPrefixCache(vectors()))):
        callback = scripted(schedule or {5: 2})
        run(module, callback, *(other() for other in others), data=data, **arguments)
        assert [(event.step, event.depth) for event in callback.events] == [(5, 2)]
        assert same(hand, module)


class Configured(Blocks):
    """Its layers are made in ``configure_model``: Lightning 19658."""

    def __init__(self):
        super().__init__(0)
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = Blocks(5).net


def test_layers_made_in_configure_model():
    check(Configured)


class Grouped(Blocks):
    """A callback adds a parameter group later: Lightning 12141."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[:5].parameters(), lr=0.05, momentum=0.9)


class AddsGroup(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2:
            trainer.optimizers[0].add_param_group({"params": list(module.net[5].parameters()), "lr": 0.01})


def test_a_group_that_is_added_later():
    check(Grouped, AddsGroup)


class OwnFinetuning(BaseFinetuning):
    """Holds the end back, and releases it: not the front."""

    def freeze_before_training(self, module):
        self.freeze(module.net[4])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.net[4], optimizer)


def test_a_block_that_is_released_behind_frozen_ones():
    """The layer modules are found again; the front freezes again with the next decision."""
    module, callback = Blocks(6), scripted({5: 2, 20: 1})
    run(module, callback, OwnFinetuning())
    assert [(event.step, event.depth) for event in callback.events] == [(5, 2), (16, 0), (17, 2), (20, 1)]
    assert "net.4.0" in callback.layer_modules


class Searched(Blocks):
    def __init__(self):
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_learning_rate_that_is_searched_first(tmp_path, monkeypatch):
    """Lightning 14674. The search leaves nothing frozen, and no event."""
    monkeypatch.chdir(tmp_path)
    module, callback = Searched(), scripted({5: 2})
    run(module, LearningRateFinder(num_training_steps=8, early_stop_threshold=None), callback)
    assert [(event.step, event.depth) for event in callback.events] == [(5, 2)]


def test_averaged_weights():
    """Lightning 21724: the model has the mean of several epochs, and of frozen layers the weights that froze."""
    module, callback, notes = Blocks(), scripted({5: 2}), Notes(weights_of("net", "0"))
    run(module, notes, callback, StochasticWeightAveraging(0.01, swa_epoch_start=2), epochs=6)
    assert callback.events[0].depth == 2
    assert torch.allclose(notes.seen[-1], notes.seen[5])


class Stateful(torch.utils.data.DataLoader):
    """Keeps its own position: Lightning 20550."""

    def __init__(self, loader):
        super().__init__(loader.dataset, loader.batch_size)
        self.place, self.resumed = 0, 0

    def __iter__(self):
        start, self.resumed = self.resumed, 0
        for self.place, batch in enumerate(super().__iter__(), 1):
            if self.place > start:
                yield batch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.resumed = state["place"]


@pytest.mark.parametrize("step", [4, 5, 6, 11])
def test_a_loader_that_keeps_its_place(tmp_path, step):
    whole, resumed = Blocks(), Blocks()
    run(whole, scripted({5: 2}), SavesAt(tmp_path, step), data=Stateful(vectors()))
    run(resumed, scripted({5: 2}), data=Stateful(vectors()), ckpt_path=tmp_path / f"{step}.ckpt")
    assert same(whole, resumed)


class Toggled(Blocks):
    """Two optimizers in turn, by hand: Lightning 21513."""

    def __init__(self):
        super().__init__(6)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        parts = self.net[:4], self.net[4:]
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]


def test_optimizers_that_are_toggled():
    hand, ours, callback = Toggled(), Toggled(), scripted({6: 2})
    run(hand, ByHand(6))
    run(ours, callback)
    assert callback.frozen_depth == 2
    assert same(hand, ours)


def test_the_fit_ends_and_nothing_is_left():
    """Copies, pickles, validation, test and prediction afterwards are those of a plain model."""
    module = Blocks(norm=nn.BatchNorm1d)
    run(module, scripted({5: 2}), data=FrozenPrefixCache(vectors()))
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(part.training for part in module.net.modules())
    x = torch.randn(4, 8)
    expected = module.eval().net(x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module.net))):
        assert torch.equal(getattr(copied, "net", copied)(x), expected)
    for part in module.modules():
        assert not {"train", "forward"} & vars(part).keys()
        assert not part._forward_pre_hooks


def test_a_second_fit_begins_from_the_start():
    module, callback = Blocks(), scripted({5: 2})
    for _ in range(2):
        run(module, callback)
        assert [(event.step, event.depth) for event in callback.events] == [(5, 2)]


class Penalised(Blocks):
    """A penalty on weights reaches frozen ones as well."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * sum(parameter.square().sum() for parameter in self.parameters() if parameter.requires_grad)


def test_a_penalty_on_weights_keeps_its_layers_from_freezing():
    said = run(Penalised(), scripted({}))
    assert any("a penalty on weights" in text for text in said)
