"""Image classification data: scikit-learn's digits, CIFAR-10, and image files from a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import CIFAR10, ImageFolder

from lightning_egeria.demos.images import LabelledImages, Sample, balanced_prefix, center_square
from lightning_egeria.errors import ArgumentError, TrainingDataError, check_integers

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class InMemoryData(L.LightningDataModule):
    """Base of data modules with data sets in memory. Subclasses implement `setup`.

    Args:
        batch_size: samples of one batch.
        num_workers: processes of each data loader.
    """

    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: Dataset[Any]
    collate_fn: Callable[[list[Any]], Any] | None = None  # None is torch's default

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        check_integers(1, batch_size=batch_size)
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled, without a last batch that is not full."""
        return self._loader(self.train_set, training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """In order, complete."""
        return self._loader(self.val_set)

    def check_train_size(self, size: int, available: int, what: str) -> None:
        """Check the size of a part of the training samples.

        Raises:
            ArgumentError: if it is smaller than a batch, or larger than the number of samples.
        """
        if not self.batch_size <= size <= available:
            raise ArgumentError(
                f"train_size must lie between batch_size ({self.batch_size}) and the {available} {what}, got {size}"
            )

    def _loader(self, samples: Dataset[Any], training: bool = False) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            shuffle=training,
            drop_last=training,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


class DigitsData(InMemoryData):
    """1,797 scans of handwritten digits that scikit-learn ships (Alpaydin and Kaynak, 1998), 8 x 8 shown at 32 x 32.

    Args:
        batch_size: samples of one batch.
        channels: 1, or 3 for networks that expect colour images: the grey channel is repeated.
        val_fraction: share of the samples held out for validation, stratified by class.
        split_seed: seed of the split.
        num_workers: processes of each data loader.
    """

    num_classes = 10

    def __init__(
        self,
        batch_size: int = 64,
        channels: int = 3,
        val_fraction: float = 0.2,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if not 0 < val_fraction < 1:
            raise ArgumentError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
        self.channels, self.val_fraction, self.split_seed = channels, val_fraction, split_seed

    def setup(self, stage: str) -> None:
        """Load, enlarge and split."""
        pixels, digits = load_digits(return_X_y=True)
        grey = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) * (255 / 16)
        large = interpolate(grey, size=(32, 32), mode="bilinear", align_corners=False)
        images = large.round().to(torch.uint8).expand(-1, self.channels, -1, -1)
        labels = torch.from_numpy(digits).long()
        train, val = train_test_split(
            np.arange(len(labels)), test_size=self.val_fraction, stratify=digits, random_state=self.split_seed
        )
        std, mean = (float(value) / 255 for value in torch.std_mean(large[train]))
        samples = LabelledImages(images, labels, (mean,) * self.channels, (std,) * self.channels)
        self.train_set, self.val_set = Subset(samples, train.tolist()), Subset(samples, val.tolist())


class Cifar10Data(InMemoryData):
    """CIFAR-10 (Krizhevsky, 2009) with a validation set held out of the training images.

    `root` is in either of two layouts:

    * torchvision's: `cifar-10-batches-py/data_batch_1` and so on;
    * lossless mosaics: `train_0.webp` to `train_4.webp` and `test.webp`, 32 x 32 tiles in row-major order, and
      `labels.npz` with `train_labels` and `test_labels`.

    Args:
        root: folder of the data.
        batch_size: samples of one batch.
        train_size: number of training samples, the same from each class; None takes all.
        val_size: samples held out of the training images for validation, stratified by class.
        augment: random shifts and mirroring of the training images.
        split_seed: seed of the split.
        num_workers: processes of each data loader.
        download: download the data into `root`, in torchvision's layout, if missing.
        size: side of the images in pixels; other than 32, they are resized.
        mean: of each channel, in [0, 1], subtracted.
        std: of each channel, divided by.
    """

    num_classes = 10

    def __init__(
        self,
        root: str,
        batch_size: int = 128,
        train_size: int | None = None,
        val_size: int = 5000,
        augment: bool = True,
        split_seed: int = 0,
        num_workers: int = 0,
        download: bool = False,
        size: int = 32,
        mean: tuple[float, ...] = CIFAR10_MEAN,
        std: tuple[float, ...] = CIFAR10_STD,
    ) -> None:
        super().__init__(batch_size, num_workers)
        check_integers(1, size=size)
        self.root, self.train_size, self.val_size = Path(root), train_size, val_size
        self.augment, self.split_seed, self.download = augment, split_seed, download
        self.size, self.mean, self.std = size, tuple(mean), tuple(std)

    def prepare_data(self) -> None:
        """Download the data if `download` is set."""
        if self.download:
            CIFAR10(str(self.root), download=True)

    def setup(self, stage: str) -> None:
        """Read and split the data of the stage, once.

        Raises:
            TrainingDataError: if `root` has neither layout.
        """
        if hasattr(self, "test_set" if stage == "test" else "train_set"):
            return
        if stage == "test":
            self.test_set = self._samples(*self._read(train=False))
            return
        images, labels = self._read(train=True)
        train, val = train_test_split(
            np.arange(len(labels)), test_size=self.val_size, stratify=labels.numpy(), random_state=self.split_seed
        )
        train, val = torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(val))
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(train), "samples that the validation set leaves")
            train = train[balanced_prefix(labels[train], self.train_size)]
        self.train_set = self._samples(images[train], labels[train], self.augment)
        self.val_set = self._samples(images[val], labels[val])

    def test_dataloader(self) -> DataLoader[Sample]:
        """The 10,000 test images, in order."""
        return self._loader(self.test_set)

    def _samples(self, images: Tensor, labels: Tensor, augment: bool = False) -> LabelledImages:
        if images.shape[-1] != self.size:
            images = interpolate(images, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return LabelledImages(images, labels, self.mean, self.std, augment)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        """Return images, uint8 `[N, 3, 32, 32]`, and labels, int64 `[N]`, of the training or the test set."""
        if (self.root / "cifar-10-batches-py").is_dir():
            dataset = CIFAR10(str(self.root), train=train)
            images, labels = dataset.data, np.asarray(dataset.targets)
        elif (self.root / "labels.npz").is_file():
            images, labels = _read_mosaics(self.root, "train" if train else "test")
        else:
            raise TrainingDataError(
                f"data.root={str(self.root)!r} holds no CIFAR-10. Expected either torchvision's layout, a folder "
                "cifar-10-batches-py/ (data.download=true downloads it), or mosaics: labels.npz beside train_0.webp, "
                "train_1.webp, ... and test.webp."
            )
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()


class FolderData(InMemoryData):
    """Images in files, `root/train/CLASS/*` and `root/val/CLASS/*`, all read into memory at one size.

    Args:
        root: folder of the data.
        size: side of the images in pixels: the square in the middle, resized.
        batch_size: samples of one batch.
        train_size: number of training samples, the same from each class; None takes all.
        augment: random shifts and mirroring of the training images.
        num_workers: processes of each data loader.
        mean: of each channel, in [0, 1], subtracted.
        std: of each channel, divided by.
    """

    def __init__(
        self,
        root: str,
        size: int = 224,
        batch_size: int = 64,
        train_size: int | None = None,
        augment: bool = True,
        num_workers: int = 0,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root, self.size, self.train_size, self.augment = Path(root), size, train_size, augment
        self.mean, self.std = tuple(mean), tuple(std)

    def setup(self, stage: str) -> None:
        """Read both splits, once.

        Raises:
            TrainingDataError: if a folder is missing or has no images.
        """
        if hasattr(self, "train_set"):
            return
        images, labels = self._read("train")
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(labels), f"images in {self.root / 'train'}")
            chosen = balanced_prefix(labels, self.train_size)
            images, labels = images[chosen], labels[chosen]
        self.train_set = LabelledImages(images, labels, self.mean, self.std, self.augment)
        self.val_set = LabelledImages(*self._read("val"), self.mean, self.std)

    def _read(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images, uint8 `[N, 3, size, size]`, and labels, int64 `[N]`, of a split."""
        try:
            folder = ImageFolder(str(self.root / split))
        except FileNotFoundError as error:
            raise TrainingDataError(
                f"data.root={str(self.root)!r} holds no images in {split}/CLASS/: {error}. Expected a folder for each "
                "class in train/ and in val/."
            ) from error
        images = [torch.from_numpy(np.array(center_square(image, self.size))) for image, _ in folder]
        return torch.stack(images).permute(0, 3, 1, 2).contiguous(), torch.tensor(folder.targets)


def _read_mosaics(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tiles of all mosaics of a split, uint8 `[N, 32, 32, 3]`, and their labels `[N]`."""
    tiles = []
    for path in sorted(root.glob(f"{split}*.webp")):
        with Image.open(path) as image:
            mosaic = np.asarray(image.convert("RGB"))
        rows, columns = mosaic.shape[0] // 32, mosaic.shape[1] // 32
        tiles.append(mosaic.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3))
    with np.load(root / "labels.npz") as arrays:
        labels: np.ndarray = arrays[f"{split}_labels"]
    if sum(map(len, tiles)) != len(labels):
        raise TrainingDataError(
            f"data.root={str(root)!r}: labels.npz has {len(labels)} labels for {split}, the {len(tiles)} mosaics "
            f"{split}*.webp have {sum(map(len, tiles))} tiles; the data are incomplete."
        )
    return np.concatenate(tiles), labels
