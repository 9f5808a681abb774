"""Labelled images in memory, their augmentation, and class-balanced parts of them."""

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

Sample = tuple[Tensor, int]


class LabelledImages(Dataset[Sample]):
    """Images in memory with their labels; the index of a sample never changes.

    Args:
        images: uint8, `[N, C, H, W]`.
        labels: int64, `[N]`.
        mean: mean of each channel of `images / 255`, `C` numbers.
        std: standard deviation of each channel of `images / 255`, `C` numbers.
        augment: shift each image by up to 4 pixels (zero padding) and mirror half of them, at random at each access
            (He et al., CVPR 2016, section 4.2).
    """

    def __init__(
        self, images: Tensor, labels: Tensor, mean: tuple[float, ...], std: tuple[float, ...], augment: bool = False
    ) -> None:
        self.images, self.labels, self.augment = images, labels, augment
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        """Return the normalised image `[C, H, W]`, float32, and its label."""
        image = (self.images[index].float() / 255 - self.mean) / self.std
        return (shift_and_flip(image) if self.augment else image), int(self.labels[index])


def shift_and_flip(image: Tensor, padding: int = 4) -> Tensor:
    """Cut a random `[C, H, W]` out of the zero-padded image `[C, H, W]` and mirror it with probability 1/2."""
    _, height, width = image.shape
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    image = pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def center_square(image: Image.Image, size: int) -> Image.Image:
    """Cut out the square in the middle and resize it to `size` pixels.

    >>> center_square(Image.new("RGB", (300, 200)), 48).size
    (48, 48)
    """
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BOX, box=box)


def balanced_prefix(labels: Tensor, size: int) -> Tensor:
    """Return the indices of `size` samples in ascending order, taking the first samples of each class in turn.

    >>> balanced_prefix(torch.tensor([0, 0, 0, 1, 0, 1]), 4)
    tensor([0, 1, 3, 5])
    """
    turn = torch.empty_like(labels)
    for label in labels.unique():
        of_class = labels == label
        turn[of_class] = torch.arange(int(of_class.sum()))
    return turn.argsort(stable=True)[:size].sort().values
