"""The SP loss as a metric of torchmetrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_egeria.freezing.similarity import similarity_preserving_loss


class SimilarityPreservingLoss(Metric):
    """Mean of `similarity_preserving_loss` over batches, as a metric.

    >>> metric = SimilarityPreservingLoss()
    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> metric.update(a, a)
    >>> metric.update(a, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    >>> metric.compute()
    tensor(0.1464)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: Tensor
    batches: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("batches", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, activation: Tensor, reference: Tensor) -> None:
        """Add one batch; arguments as for `similarity_preserving_loss`."""
        self.total = self.total + similarity_preserving_loss(activation, reference)
        self.batches = self.batches + 1

    def compute(self) -> Tensor:
        """Return the mean over the batches so far; NaN before the first."""
        return self.total / self.batches
