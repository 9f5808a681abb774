"""Semantic segmentation: CamVid from a folder, and an ordinary LightningModule without any freezing code."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassJaccardIndex

from lightning_egeria.demos.classifier import load_weights
from lightning_egeria.demos.data import IMAGENET_MEAN, IMAGENET_STD, InMemoryData
from lightning_egeria.demos.schedules import ScheduledModule
from lightning_egeria.errors import TrainingDataError

CLASSES = 11
VOID = 11  # label of pixels that do not count


class LabelledPixels(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory with a label for each pixel.

    Args:
        images: uint8, `[N, 3, H, W]`.
        masks: uint8, `[N, H, W]`.
        augment: mirror each image with probability 1/2 at each access.
    """

    def __init__(self, images: Tensor, masks: Tensor, augment: bool = False) -> None:
        self.images, self.masks, self.augment = images, masks, augment
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the normalised image `[3, H, W]`, float32, and the labels `[H, W]`, int64."""
        image, mask = (self.images[index].float() / 255 - self.mean) / self.std, self.masks[index].long()
        if self.augment and torch.rand(()) < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        return image, mask


class CamVidData(InMemoryData):
    """CamVid (Brostow et al., 2009) with the 11 classes and the split of SegNet (Badrinarayanan et al.).

    `root` is in either of two layouts:

    * SegNet's: images in `train/`, `val/` and labels of the same names in `trainannot/`, `valannot/`;
    * lossless mosaics: `train.webp` and `val.webp`, tiles in row-major order, 20 in a row, and `masks.npz` with
      `train_masks` and `val_masks`.

    Args:
        root: folder of the data.
        batch_size: samples of one batch.
        train_size: number of training samples, from the first on; None takes all.
        augment: mirror training images at random.
        num_workers: processes of each data loader.
    """

    def __init__(
        self, root: str, batch_size: int = 8, train_size: int | None = None, augment: bool = True, num_workers: int = 0
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root, self.train_size, self.augment = Path(root), train_size, augment

    def setup(self, stage: str) -> None:
        """Read both splits, once.

        Raises:
            TrainingDataError: if `root` has neither layout.
        """
        if hasattr(self, "train_set"):
            return
        images, masks = self._read("train")
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(images), "training images")
            images, masks = images[: self.train_size], masks[: self.train_size]
        self.train_set = LabelledPixels(images, masks, self.augment)
        self.val_set = LabelledPixels(*self._read("val"))

    def _read(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images, uint8 `[N, 3, H, W]`, and labels, uint8 `[N, H, W]`."""
        if (self.root / f"{split}annot").is_dir():
            names = sorted(path.name for path in (self.root / f"{split}annot").glob("*.png"))
            images = np.stack([_pixels(self.root / split / name).astype(np.uint8) for name in names])
            masks = np.stack([np.asarray(Image.open(self.root / f"{split}annot" / name)) for name in names])
        elif (self.root / "masks.npz").is_file():
            with np.load(self.root / "masks.npz") as arrays:
                masks = arrays[f"{split}_masks"]
            count, height, width = masks.shape
            mosaic = _pixels(self.root / f"{split}.webp")
            rows, columns = mosaic.shape[0] // height, mosaic.shape[1] // width
            tiles = mosaic.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
            images = tiles[:count]
        else:
            raise TrainingDataError(
                f"data.root={str(self.root)!r} holds no CamVid. Expected either SegNet's layout, {split}/*.png beside "
                f"{split}annot/*.png, or mosaics: {split}.webp beside masks.npz."
            )
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(masks.copy())


def _pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


class EncoderSegmenter(nn.Module):
    """A network for classification that labels pixels: two convolutions on its last features, and upsampling.

    Args:
        encoder: maps images `[B, 3, H, W]` to features `[B, C, h, w]`, such as a timm network with `num_classes=0` and
            `global_pool=""`; has `num_features` (C).
        num_classes: number of classes.
        width: channels between the two convolutions.
        weights: file of initial weights of the encoder, as for `load_weights`.

    >>> import timm
    >>> encoder = timm.create_model("tf_efficientnet_lite0", num_classes=0, global_pool="", output_stride=16)
    >>> EncoderSegmenter(encoder, num_classes=11)(torch.zeros(2, 3, 64, 48))["out"].shape
    torch.Size([2, 11, 64, 48])
    """

    def __init__(self, encoder: nn.Module, num_classes: int, width: int = 128, weights: str | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        if weights is not None:
            load_weights(encoder, weights)
        features: Any = encoder.num_features
        self.decoder = nn.Sequential(
            nn.Conv2d(features, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, num_classes, 3, padding=1),
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images `[B, 3, H, W]` to logits `[B, num_classes, H, W]`, as `"out"`."""
        logits = self.decoder(self.encoder(images))
        return {"out": F.interpolate(logits, size=images.shape[-2:], mode="bilinear", align_corners=False)}


class ImageSegmenter(ScheduledModule):
    """Train `net` with cross entropy on batches `(images [B, 3, H, W], labels [B, H, W])`.

    Logs `train/loss`, `val/loss` and `val/miou`, the mean intersection over union of the classes.

    Args:
        net: maps images to a dictionary with logits `[B, num_classes, H, W]` as `"out"`, as torchvision's networks do.
        num_classes: number of classes; the label `num_classes` marks pixels that do not count.
        optimizer, scheduler, scheduler_interval, scheduler_length_name: as for `ScheduledModule`.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        scheduler_interval: str = "step",
        scheduler_length_name: str | None = None,
    ) -> None:
        super().__init__(optimizer, scheduler, scheduler_interval, scheduler_length_name)
        self.net = net
        self.void = num_classes
        self.val_miou = MulticlassJaccardIndex(num_classes + 1, ignore_index=num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[B, 3, H, W]` to logits `[B, num_classes, H, W]`."""
        logits: Tensor = self.net(images)["out"]
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the pixels that count, a scalar."""
        images, masks = batch
        loss = F.cross_entropy(self(images), masks, ignore_index=self.void)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and mean intersection over union of the validation set."""
        images, masks = batch
        logits = self(images)
        self.val_miou(logits.argmax(1), masks)
        self.log("val/loss", F.cross_entropy(logits, masks, ignore_index=self.void), prog_bar=True, sync_dist=True)
        self.log("val/miou", self.val_miou, prog_bar=True)
