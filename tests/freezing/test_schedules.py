"""Learning-rate schedules: smooth ones keep the prefix, jumps release it."""

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_egeria import FreezingPolicy
from support.freezing.setups import Module, freezing, new
from support.models import fit

SCHEDULES = {
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 30), False),
    "linear": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.01, 30), False),
    "one-cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=31), False),
    "step decay": (lambda o: lr_scheduler.StepLR(o, 20, gamma=0.1), True),
    "warm restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20), True),
    "none": (lambda o: lr_scheduler.ConstantLR(o, 1.0), False),
}


class Eager(FreezingPolicy):
    """Freezes the first layer module at step 13, and lets go again by its own rule."""

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        decision = super().observe(step, None, learning_rate, None)
        if step == 13:
            self.depth, self._lr_at_freeze = 1, learning_rate
            return type(decision or self._early)(1, "early")
        return decision

    @property
    def _early(self):
        from lightning_egeria.core.training.freezer import Decision

        return Decision(1, "early")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_smooth_schedules_keep_the_prefix_and_jumps_release_it(schedule):
    make, unfreezes = SCHEDULES[schedule]

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": make(optimizer), "interval": "step"}]

    callback = freezing(Eager(tolerance=1e-12))
    fit(new(Scheduled), callback, epochs=6)
    assert [event.kind for event in callback.events] == (["freeze", "unfreeze"] if unfreezes else ["freeze"])


def test_reduce_on_plateau():
    class Plateau(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", torch.tensor(1.0))  # never gets better
            return loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    callback = freezing(Eager(tolerance=1e-12))
    fit(new(Plateau), callback, epochs=6)
    assert [event.kind for event in callback.events] == ["freeze", "unfreeze"]
