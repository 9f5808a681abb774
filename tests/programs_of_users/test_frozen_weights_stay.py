"""Frozen weights and statistics stay as they are, whatever the optimizer and the modes do."""

import logging

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria import FreezingPolicy, FrozenPrefixCache, KnowledgeGuidedFreezing
from support.user_programs import Blocks, Notes, SavesAt, run, same, scripted, vectors, weights_of


class Eager(torch.optim.Optimizer):
    """Momentum and decay for every parameter, as if a missing gradient were zero."""

    def __init__(self, params, lr=0.02, decay=0.1, assigns=False):
        super().__init__(params, {"lr": lr, "decay": decay})
        self.assigns = assigns

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                if self.assigns:
                    p.grad = gradient
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(gradient)
                p.mul_(1 - group["lr"] * group["decay"]).sub_(buffer, alpha=group["lr"])
        return loss


class Lookahead(torch.optim.SGD):
    """Every seven steps it returns half of the way to where it was seven steps before."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                count = state["count"] = state.get("count", 0) + 1
                slow = state.setdefault("slow", p.clone())
                if count % 7 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return loss


class Optimized(Blocks):
    def __init__(self, optimizer, norm=nn.LayerNorm, **arguments):
        super().__init__(norm=norm)
        self.make = lambda parameters: optimizer(parameters, **arguments)

    def configure_optimizers(self):
        return self.make(self.parameters())


def guided():
    return KnowledgeGuidedFreezing(FreezingPolicy(pretrained=True), deterministic=True, background=False)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("make", [lambda: scripted({12: 2}), guided])
@pytest.mark.parametrize(("optimizer", "arguments"), [(Eager, {}), (Eager, {"assigns": True})])
def test_an_optimizer_that_moves_frozen_weights_is_named(optimizer, arguments, make, cached):
    """Public report: Muon 54. Nothing stays frozen with it."""
    module, callback = Optimized(optimizer, **arguments), make()
    data = FrozenPrefixCache(vectors(256)) if cached else vectors(256)
    said = run(module, callback, data=data, epochs=3)
    (text,) = [one for one in said if "moves" in one]
    assert f"{optimizer.__name__} moves 'net.0." in text
    assert "which is frozen and has no gradient" in text
    first, last = callback.events
    assert (last.kind, last.depth) == ("unfreeze", 0)
    assert last.step - first.step == 1


@pytest.mark.parametrize("make", [lambda: scripted({12: 2}), guided])
def test_one_that_moves_them_once_is_told_of(make, caplog):
    """It returns to where the weights were before they froze, and then they stay."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    callback = make()
    run(Optimized(Lookahead, lr=0.05), callback, data=vectors(256), epochs=3)
    assert len(callback.events) == 1
    (text,) = [one.getMessage() for one in caplog.records if "has changed although" in one.getMessage()]
    assert "'net.0." in text
    assert "has changed although it is frozen: Lookahead or other code has moved it" in text


class Decays(torch.optim.SGD):
    """It shrinks all weights every fifth step."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups if self.count % 5 == 0 else ():
            for p in group["params"]:
                p.mul_(0.99)
        return loss


def test_one_that_moves_them_now_and_then_is_named():
    callback = scripted({12: 2})
    said = run(Optimized(Decays, lr=0.05), callback, data=vectors(256), epochs=3)
    assert any("Decays moves 'net.0." in text for text in said)
    assert callback.frozen_depth == 0


def test_a_resumed_run_knows_that_it_gave_up(tmp_path):
    whole, resumed, again = Optimized(Eager), Optimized(Eager), scripted({12: 2, 20: 1})
    run(whole, scripted({12: 2, 20: 1}), SavesAt(tmp_path, 16))
    run(resumed, again, ckpt_path=tmp_path / "16.ckpt")
    assert [event.depth for event in again.events] == [2, 0]
    assert same(whole, resumed)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
        lambda p: torch.optim.NAdam(p, lr=1e-2),
    ],
)
def test_those_of_torch_leave_them_alone(optimizer):
    module, callback, notes = Optimized(optimizer), scripted({12: 2}), Notes(weights_of("net", "0"))
    said = run(module, notes, callback)
    assert said == []
    assert callback.frozen_depth == 2
    assert all(torch.equal(seen, notes.seen[12]) for seen in notes.seen[12:])


class Zeroes(torch.optim.SGD):
    """It writes a gradient of zero where there is none, and moves nothing by it."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().step()
        return loss


def test_an_optimizer_that_writes_gradients_is_not_taken_for_other_code():
    said = run(Optimized(Zeroes, lr=0.05), scripted({12: 2}))
    (text,) = [one for one in said if "received a gradient" in one]
    assert "the optimizer, or code that runs with its step, wrote it" in text


class Stubborn(nn.Sequential):
    """A container that lets its parts train in validation too."""

    def train(self, mode=True):
        super().train(mode)
        for part in self.modules():
            part.training = True
        return self


class Validated(Blocks):
    def __init__(self):
        super().__init__(norm=nn.BatchNorm1d)
        self.net = Stubborn(*self.net)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.net.train()
        self.net(batch[0] + 3)


class Statistics(L.Callback):
    """The running mean of the first and the last block before and after each validation."""

    def __init__(self):
        self.first, self.last = [], []

    def note(self, trainer, module):
        self.first.append(module.net[0][1].running_mean.clone())
        self.last.append(module.net[4][1].running_mean.clone())

    on_validation_start = on_validation_end = note


def test_frozen_statistics_stand_still_in_validation():
    """Public report: gt-pyg 112."""
    module, seen = Validated(), Statistics()
    run(module, scripted({5: 2}), seen, validation=vectors(32), epochs=4)
    assert all(torch.equal(seen.first[1], one) for one in seen.first[2:])
    assert not torch.equal(seen.last[-2], seen.last[-1])  # the user's own module does what it does
