"""What Selective-Backprop is compared with: the same share of samples at random, and importance sampling."""

from collections.abc import Mapping
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightning_egeria import SelectiveBackprop
from lightning_egeria.methods.selecting.rule import SelectionRule
from lightning_egeria.methods.selecting.stats import SelectionStats

BETA = 1
SHARE = 1 / (BETA + 1)
METHODS: Mapping[str, dict[str, Any]] = {
    "selective": {},
    "in_batch": {"mode": "in_batch"},
    "selective_stale": {"staleness": 2},
    "selective_freezing": {},
    "selective_cached": {},
}


class RandomRule(SelectionRule):
    """Keeps each sample with the same probability, whatever its loss."""

    needs_losses = False

    def probabilities(self, losses: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.full(len(losses), SHARE)


class RandomSelection(SelectiveBackprop):
    """Samples are kept at random. Nothing is scored."""

    def make_rule(self) -> SelectionRule:
        return RandomRule(self.beta, self.history)


class ImportanceSampling(lightning.Callback):
    """Katharopoulos and Fleuret (ICML 2018, arXiv:1803.00942): samples drawn by an upper bound of their gradient norm.

    The bound is the norm of the loss's gradient at the logits. Samples are drawn with replacement in proportion to it,
    and weighted so that the gradient has the same mean as that of the whole batch. The first epoch is whole.

    Args:
        share: of each batch to draw.

    Attributes:
        selection: what was done.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.selection = SelectionStats(off=None)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        whole: Any = pl_module.training_step
        drawn = torch.Generator().manual_seed(torch.initial_seed())

        def training_step(batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            images, labels = batch
            count, stats = len(labels), self.selection
            if trainer.current_epoch == 0:
                stats.count(0, seen=count, trained=count)
                return whole(batch, batch_idx)
            modes = [(part, part.training) for part in pl_module.modules()]
            with torch.no_grad():
                pl_module.eval()
                likelihoods = pl_module(images).float().softmax(1)
                bound = (likelihoods - F.one_hot(labels, likelihoods.shape[1])).norm(dim=1)
            for part, mode in modes:
                part.training = mode
            likely = (bound / bound.sum()).cpu()
            kept = max(1, round(self.share * count))
            rows = torch.multinomial(likely, kept, replacement=True, generator=drawn)
            weights = (1 / (count * likely[rows])).to(images.device)
            stats.count(trainer.current_epoch, seen=count, scored=count, trained=kept)
            rows = rows.to(images.device)
            return (weights * F.cross_entropy(pl_module(images[rows]), labels[rows], reduction="none")).mean()

        vars(pl_module)["training_step"] = training_step

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        vars(pl_module).pop("training_step", None)


def wrapped(
    method: str, datamodule: lightning.LightningDataModule, seed: int, mode: str
) -> lightning.LightningDataModule:
    """The data of a run by one of these methods; the data themselves for any other."""
    if method in METHODS:
        return SelectiveBackprop(datamodule, beta=BETA, seed=seed, **{"mode": mode} | METHODS[method])
    if method == "random":
        return RandomSelection(datamodule, beta=BETA, seed=seed, mode=mode)
    return datamodule
