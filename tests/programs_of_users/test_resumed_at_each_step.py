"""A resumed run is the uninterrupted one, whatever the policy, stopped before, at and after each event."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, SlopePolicy
from support.user_programs import Blocks, ByStep, Finetuned, SavesAt, releasing, run, same, scripted

STEPS = 32  # 4 epochs


class Decaying:
    """The learning rate falls, so that layers may freeze from scratch; and rises once more."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 8 or step > 24 else 0.05)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


class Plain(ByStep, Decaying, Blocks):
    pass


class OfAll(ByStep, Blocks):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Backbone(ByStep, Finetuned):
    pass


class SmallHead(ByStep, Finetuned):
    """The callback waits until the backbone is released."""

    def __init__(self):
        super().__init__(layers=1)


def looks_trained(module):
    for part in module.modules():
        if isinstance(part, nn.LayerNorm | nn.BatchNorm1d):
            for name, tensor in part.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + (0.5 if name != "bias" else 0))
    return module


POLICIES = {
    "schedule": lambda: scripted({5: 2, 11: 0, 19: 3, 27: 1}),
    "auto": lambda: guided(FreezingPolicy(tolerance=0.5, patience=2)),
    "from scratch": lambda: guided(FreezingPolicy(tolerance=0.5, patience=2, pretrained=False)),
    "trained": lambda: guided(FreezingPolicy(pretrained=True)),
    "trained, compared": lambda: guided(FreezingPolicy(pretrained=True, trial=False, peer_tolerance=0.9)),
    "slopes": lambda: guided(SlopePolicy()),
}


def guided(policy):
    return KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=3, deterministic=True, background=False)


def check(make, policy, tmp_path, steps, *others):
    """Compare a run with those that resume from each of its steps; return the events."""
    whole, callback = make(), POLICIES[policy]()
    epochs = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    own = (callback, *(other() for other in others), SavesAt(tmp_path, *steps), epochs)
    run(whole, *own, enable_checkpointing=True)
    for step in (*steps, "epoch=0", "epoch=1", "epoch=2"):
        resumed, again = make(), POLICIES[policy]()
        run(resumed, again, *(other() for other in others), ckpt_path=tmp_path / f"{step}.ckpt")
        assert again.events == callback.events, step
        assert again.layer_modules == callback.layer_modules, step
        assert same(whole, resumed), step
    return callback.events


# Half of the table in an ordinary run: each policy once, each kind of weights.
TABLE = [
    pytest.param(policy, trained, marks=[pytest.mark.slow] * ((at + trained) % 2))
    for at, policy in enumerate(POLICIES)
    for trained in (False, True)
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("policy", "trained"), TABLE)
def test_alone(policy, trained, tmp_path):
    steps = [*range(1, 8), *range(8, STEPS, 3), 19, 27]
    events = check(lambda: looks_trained(Plain()) if trained else Plain(), policy, tmp_path, steps)
    assert events or policy == "slopes"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [Backbone, SmallHead])
@pytest.mark.parametrize("release", [1, 2])
@pytest.mark.parametrize("policy", ["schedule", "auto", "trained", pytest.param("slopes", marks=pytest.mark.slow)])
def test_with_a_backbone_that_is_released(policy, release, make, tmp_path):
    """Public report: Lightning 21901."""
    if policy == "schedule" and make is Backbone:
        pytest.skip("the head alone allows one layer module, which the schedule exceeds")
    check(make, policy, tmp_path, (1, 7, 9, 15, 17, 20, 28), lambda: releasing(release))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_released_backbone_moves_again_and_a_message_says_so(tmp_path):
    whole, resumed = Backbone(), Backbone()
    run(whole, guided(None), releasing(1), SavesAt(tmp_path, 20))
    before = copy.deepcopy(torch.load(tmp_path / "20.ckpt", weights_only=False)["state_dict"])
    said = run(resumed, guided(None), releasing(1), ckpt_path=tmp_path / "20.ckpt")
    assert any("when the run resumed, a callback froze 'backbone.0.0.weight' and 7 more" in text for text in said)
    assert not torch.equal(before["backbone.0.0.weight"], resumed.backbone[0][0].weight)


def test_a_model_that_trains_less_is_looked_at_again(tmp_path):
    run(OfAll(), scripted({5: 2}), SavesAt(tmp_path, 20))
    module, callback = OfAll(), scripted({5: 2, 25: 1})
    module.net[0].requires_grad_(False)
    said = run(module, callback, ckpt_path=tmp_path / "20.ckpt")
    text = "differs from the model's: 'net.0.0.weight' and 3 more trained when the checkpoint was written, and does not"
    assert any(text in one for one in said)
    assert callback.layer_modules == ["net.1.0", "net.2.0", "net.3.0", "net.4.0"]
    assert [(event.step, event.depth) for event in callback.events] == [(5, 2), (20, 0), (21, 2), (25, 1)]
    assert not any(parameter.requires_grad for parameter in module.net[0].parameters())


class HoldsBack(L.Callback):
    """Says at the start of each epoch what trains: the first block does so from the third epoch on."""

    def on_train_epoch_start(self, trainer, module):
        module.net[0].requires_grad_(trainer.current_epoch >= 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("policy", ["schedule", "from scratch", "trained, compared"])
def test_with_a_callback_that_holds_layers_back_in_each_epoch(policy, tmp_path):
    check(OfAll, policy, tmp_path, (), HoldsBack)
