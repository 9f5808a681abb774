"""Two processes under DDP: whatever is released, appears or freezes, their weights stay equal."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_egeria import KnowledgeGuidedFreezing, StructuredPartialBackprop
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks
from support.user_programs import Blocks, Finetuned, releasing, run, scripted, vectors


class Digests(L.Callback):
    """The sum of all weights after each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(float(sum(p.detach().double().sum() for p in module.parameters())))


class OfOneLayer(Finetuned):
    """Its head has one layer module, so the callback waits until the backbone is released."""

    def __init__(self):
        super().__init__(layers=2, norm=nn.LayerNorm)


class OfMoreLayers(Finetuned):
    def __init__(self):
        super().__init__(layers=4, norm=nn.LayerNorm)


class ReleasesAtStep(L.Callback):
    """Releases a block within an epoch."""

    def on_fit_start(self, trainer, module):
        module.backbone[0].requires_grad_(False)

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 3:
            module.backbone[0].requires_grad_(True)


class FrozenFront(OfMoreLayers):
    def __init__(self):
        super().__init__()
        self.backbone[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Dropping(Blocks):
    """Each process leaves out other blocks; and one of them a branch in front."""

    def __init__(self):
        super().__init__(6)
        self.branch = nn.Linear(8, 8)

    def training_step(self, batch, _):
        torch.manual_seed(100 * self.global_rank + self.trainer.global_step)
        x = batch[0]
        if self.global_rank == 1 and self.trainer.global_step in (9, 11):
            x = x + self.branch(x)
        for block in self.net:
            if isinstance(block, nn.Linear) or torch.rand(()) > 0.3:
                x = block(x)
        return nn.functional.cross_entropy(x, batch[1])


def job(kind, callbacks, find_unused):
    made = [make() for make in callbacks]
    digests, module = Digests(), kind()
    strategy = DDPStrategy(timeout=EXCHANGE_TIMEOUT, find_unused_parameters=find_unused)
    run(module, *made, digests, data=vectors(), epochs=4, strategy=strategy, devices=2)
    freezing = next(one for one in made if isinstance(one, KnowledgeGuidedFreezing))
    return digests.seen, [(event.step, event.depth) for event in freezing.events], freezing.layer_modules


def guided():
    return KnowledgeGuidedFreezing(deterministic=True, background=False)


def releases():
    return releasing(1)


def later():
    return scripted({10: 2, 14: 0}, evaluate_every_n_steps=1)


CASES = {
    "one layer": (OfOneLayer, (releases, guided), False),
    "one layer, scripted": (OfOneLayer, (releases, later), False),
    "more layers": (OfMoreLayers, (releases, guided), False),
    "within an epoch": (FrozenFront, (ReleasesAtStep, later), False),
    "with partial backprop": (OfOneLayer, (releases, guided, StructuredPartialBackprop), False),
    "layers left out": (Dropping, (later,), True),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_equal(case):
    """Public report: Lightning 20340."""
    (first, events, layers), (second, other_events, other_layers) = all_well(in_ranks(2, job, *CASES[case]))
    assert first == second
    assert (events, layers) == (other_events, other_layers)
    assert len(first) == 16
    assert first[0] != first[-1]
    if later in CASES[case][1]:
        assert [depth for _, depth in events] == [2, 0]
