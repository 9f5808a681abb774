"""An ordinary LightningModule for image classification, without any freezing code."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from lightning_egeria.demos.schedules import ScheduledModule
from lightning_egeria.errors import ArgumentError, first_of

HEADS = ("linear.", "fc.", "classifier.", "head.")  # names in the demos, torchvision and timm


class ImageClassifier(ScheduledModule):
    """Train `net` with cross entropy on batches `(images [B, C, H, W], labels [B])`.

    Logs `train/loss`, `val/loss`, `val/acc`, and `test/acc` when the Trainer tests.

    Args:
        net: maps images `[B, C, H, W]` to logits `[B, num_classes]`.
        num_classes: number of classes.
        optimizer, scheduler, scheduler_interval, scheduler_length_name: as for `ScheduledModule`.
        weights: file of initial weights, as for `load_weights`.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        scheduler_length_name: str | None = None,
        weights: str | None = None,
    ) -> None:
        super().__init__(optimizer, scheduler, scheduler_interval, scheduler_length_name)
        self.net = net
        if weights is not None:
            load_weights(net, weights)
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[B, C, H, W]` to logits `[B, num_classes]`."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the batch, a scalar."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy over the validation set."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val/acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy over the test set."""
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test/acc", self.test_accuracy)


def load_weights(net: nn.Module, path: str, left_out: Sequence[str] = HEADS) -> None:
    """Load parameters and buffers of `net` from a safetensors file.

    Args:
        net: the network.
        path: the file.
        left_out: prefixes of names to skip: the head, which is for other classes.

    Raises:
        ArgumentError: if the file does not exist, or holds another network.
    """
    if not Path(path).is_file():
        raise ArgumentError(f"model.weights={path}: no such file")
    state = {name: value for name, value in load_file(path).items() if not name.startswith(tuple(left_out))}
    own = {name: value for name, value in net.state_dict().items() if not name.startswith(tuple(left_out))}
    # Files from before PyTorch counted the batches of a BatchNorm lack that number.
    wrong = [
        name
        for name in sorted(state.keys() | own.keys())
        if not name.endswith("num_batches_tracked")
        and (name not in state or name not in own or state[name].shape != own[name].shape)
    ]
    if wrong:
        raise ArgumentError(f"model.weights={path} holds another network; tensors that differ: {first_of(wrong)}")
    net.load_state_dict(state, strict=False)
