"""A layer freezes for what is known of itself, not for the statistics of layers that the user froze."""

import pytest
import torch
from torch import nn

from lightning_egeria import FreezingPolicy, FrozenPrefixCache, KnowledgeGuidedFreezing
from support.user_programs import Blocks, Notes, run, same, scripted, vectors, weights_of


def look_trained(module):
    """Give normalisation layers the values that training gives them."""
    for part in module.modules():
        if isinstance(part, nn.LayerNorm | nn.BatchNorm1d):
            for name, tensor in part.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + (0.5 if name != "bias" else 0))


def freezing(**arguments):
    return KnowledgeGuidedFreezing(deterministic=True, background=False, **arguments)


class HeadOnTrained(Blocks):
    """A trained backbone, which the user froze, and a new head of three layers."""

    def __init__(self, affine=True, norm_in_head=False):
        super().__init__(0)
        self.backbone = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU()) for _ in range(4))
        )
        look_trained(self.backbone)
        self.backbone.requires_grad_(False).eval()
        own = [nn.LayerNorm(16)] if norm_in_head else []
        self.net = nn.Sequential(nn.Linear(8, 16), *own, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(self.backbone(batch[0])), batch[1])


@pytest.mark.parametrize("arguments", [{}, {"affine": False}, {"norm_in_head": True}])
def test_a_new_head_behind_a_frozen_backbone_trains(arguments):
    """Public report: pytorch 120495."""
    plain, ours = HeadOnTrained(**arguments), HeadOnTrained(**arguments)
    callback = freezing()
    run(plain, epochs=6)
    run(ours, callback, epochs=6)
    assert callback.active_policy.pretrained is False
    assert callback.events == []
    assert same(plain, ours)


class Adapted(Blocks):
    """Trained blocks that the user froze, each with a small adapter that trains, as LoRA has them."""

    def __init__(self):
        super().__init__(6)
        look_trained(self.net)
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
        for adapter in self.adapters:
            nn.init.zeros_(adapter.weight)

    def training_step(self, batch, _):
        x = batch[0]
        for block, adapter in zip(self.net, self.adapters, strict=False):
            x = block(x) + adapter(x)
        return nn.functional.cross_entropy(self.net[-1](x), batch[1])


def test_adapters_of_a_trained_network_are_new():
    """Public report: peft 427."""
    plain, ours, callback = Adapted(), Adapted(), freezing()
    run(plain, epochs=6)
    run(ours, callback, epochs=6)
    assert callback.events == []
    assert same(plain, ours)


class Longer(Blocks):
    """Trained blocks that train on, and behind them as many new layers without normalisation."""

    def __init__(self, middle=False):
        super().__init__(4)
        look_trained(self.net)
        new = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)]
        if middle:  # one of them says that it is new
            new[0].append(nn.LayerNorm(8))
        self.net = nn.Sequential(*self.net[:4], *new, nn.Linear(8, 3))


@pytest.mark.parametrize("middle", [False, True])
def test_new_layers_behind_trained_ones_do_not_freeze_with_them(middle):
    module, callback = Longer(middle), freezing()
    run(module, callback, data=vectors(256), epochs=12)
    assert callback.active_policy.pretrained is True
    assert callback.method_state()["max_depth"] == 4
    assert all(event.depth <= 4 for event in callback.events)


def test_a_new_layer_in_front_of_trained_ones_keeps_them_from_freezing():
    """Its own normalisation says that it is new."""
    module, callback = Blocks(6), freezing()
    look_trained(module.net[1:])
    run(module, callback, data=vectors(256), epochs=4)
    assert callback.active_policy.pretrained is False
    assert callback.events == []


def test_the_user_may_know_better():
    policy = FreezingPolicy(pretrained=True)
    callback = KnowledgeGuidedFreezing(policy, max_loss_points=2, deterministic=True, background=False)
    run(HeadOnTrained(), callback, epochs=6)
    assert [event.depth for event in callback.events] == [1]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("make", [HeadOnTrained, Blocks])
def test_freeze_until_0_freezes_nothing(make, cached):
    """It lets a cache serve what the user has frozen; the schedule of the policy does not matter."""
    plain, ours, callback = make(), make(), freezing(freeze_until=0)
    run(plain, epochs=6)
    data = FrozenPrefixCache(vectors()) if cached else vectors()
    said = run(ours, callback, data=data, epochs=6)
    assert callback.events == []
    assert (callback.frozen_depth, same(plain, ours)) == (0, True)
    if cached and make is HeadOnTrained:
        assert data.stats.hits > 0
    assert not any("freezing: nothing froze" in text for text in said)


def test_freeze_until_0_contradicts_a_schedule():
    with pytest.raises(ValueError, match="this model allows at most 0"):
        run(Blocks(), scripted({2: 1}, freeze_until=0))


def test_a_frozen_front_stays_as_it_is_in_a_run_of_ours():
    module = HeadOnTrained()
    notes = Notes(weights_of("backbone"))
    run(module, notes, KnowledgeGuidedFreezing(FreezingPolicy(pretrained=True), deterministic=True, background=False))
    assert all(torch.equal(seen, notes.seen[0]) for seen in notes.seen)
    assert not any(parameter.requires_grad for parameter in module.backbone.parameters())
