"""Code that switches requires_grad itself, and layers that begin to learn later."""

import itertools

import pytest
import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch import nn

from lightning_egeria import ScriptedPolicy
from support.freezing.setups import Filtering, Module, Watching, freezing, new
from support.models import After, fit, left_behind


def test_code_that_switches_requires_grad_itself_is_left_alone():
    class Toggles(Module):
        def on_train_batch_start(self, batch, batch_idx):
            self.net.requires_grad_(True)

    callback, module = freezing(ScriptedPolicy({3: 2, 8: 1})), new(Toggles)
    with pytest.warns(UserWarning, match=r"'net\.stem\.\S+' received a gradient.*nothing freezes") as told:
        fit(module, callback)
    assert len([w for w in told if "received a gradient" in str(w.message)]) == 1
    assert [(event.step, event.depth) for event in callback.events] == [(3, 2), (4, 0)]
    assert left_behind(module) == []


def test_a_backbone_that_is_released_later_is_found_then():
    class Releases(pl_callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze([pl_module.net.stem, pl_module.net.middle], train_bn=False)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group([pl_module.net.stem, pl_module.net.middle], optimizer, train_bn=False)

    class More(Filtering):
        def __init__(self):
            super().__init__()
            net = self.net
            net.deep = nn.Sequential(net.deep, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))

    callback, module = freezing(ScriptedPolicy({4: 1, 14: 1})), new(More)
    found = {}
    with pytest.warns(UserWarning, match=r"started training after the layer modules were found"):
        fit(
            module,
            callback,
            Releases(),
            After(lambda *_: found.update({_[0].global_step: callback.layer_modules[0]}), 5, 15),
            epochs=4,
        )
    assert found == {5: "net.deep.0.0", 15: "net.stem.0"}
    assert [(event.step, event.depth) for event in callback.events] == [(4, 1), (10, 0), (11, 1)]


class BackboneAndHead(Module):
    def __init__(self):
        super().__init__()
        del self.net
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("names", [None, ["backbone.1", "backbone.3", "backbone.4"]])
def test_a_head_of_one_layer_waits_for_its_backbone(names):
    callback = freezing(ScriptedPolicy({8: 1}), layer_modules=names)
    found, moved = {}, []

    def look(trainer, module):
        found[trainer.global_step] = callback.layer_modules
        moved.append(module.backbone[1].weight.detach().clone())

    finetuning = pl_callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    with pytest.warns(UserWarning, match=r"freezing: .*not training yet: 'backbone\.1\.weight' and \d+ more\.") as told:
        fit(new(BackboneAndHead), finetuning, callback, After(look, 5, 7, 8, 15))
    assert len([w for w in told if "freezing: " in str(w.message)]) == 1
    assert found[5] == []
    assert found[7] == found[8] == found[15] == ["backbone.1", "backbone.3", "backbone.4"]
    assert [(event.step, event.depth) for event in callback.events] == [(8, 1)]
    assert [torch.equal(a, b) for a, b in itertools.pairwise(moved)] == [False, False, True]


def test_the_limit_follows_what_learns_now():
    class LongHead(BackboneAndHead):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))

    class Allowed(Watching):
        def start(self, max_depth):
            allowed.append(max_depth)

    callback, allowed = freezing(Allowed(), freeze_until="backbone.3"), []

    finetuning = pl_callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    with pytest.warns(UserWarning, match="started training after"):
        fit(new(LongHead), finetuning, callback)
    assert allowed == [0, 2]  # backbone.3 does not learn at first
    assert callback.layer_modules[:3] == ["backbone.1", "backbone.3", "backbone.4"]


def test_a_backbone_without_gradients_in_the_first_epochs():
    class Late(BackboneAndHead):
        def training_step(self, batch, batch_idx):
            with torch.set_grad_enabled(self.current_epoch >= 2):
                features = self.backbone(batch[0])
            return nn.functional.cross_entropy(self.head(features), batch[1])

    callback = freezing(Watching())
    with pytest.warns(UserWarning, match="that are not training yet") as told:
        fit(new(Late), callback)
    assert len([w for w in told if "freezing: " in str(w.message)]) == 1
    assert callback.layer_modules == ["backbone.1", "backbone.3", "backbone.4"]


def test_a_head_of_one_layer_alone_trains_to_the_end():
    class Alone(BackboneAndHead):
        def __init__(self):
            super().__init__()
            self.backbone.requires_grad_(False)

    callback = freezing(Watching())
    with pytest.warns(UserWarning, match="that are not training yet"):
        fit(new(Alone), callback)
    assert (callback.events, callback.layer_modules) == ([], [])
