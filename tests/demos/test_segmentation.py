from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lightning_egeria.demos.segmentation import VOID, CamVidData, ImageSegmenter
from lightning_egeria.errors import ArgumentError, TrainingDataError
from support.models import trainer_of

HEIGHT, WIDTH, COUNTS = 6, 8, {"train": 23, "val": 5}


def random_split(split):
    generator = np.random.default_rng(COUNTS[split])
    images = generator.integers(256, size=(COUNTS[split], HEIGHT, WIDTH, 3), dtype=np.uint8)
    return images, generator.integers(12, size=(COUNTS[split], HEIGHT, WIDTH), dtype=np.uint8)


@pytest.fixture
def mosaics(tmp_path):
    masks = {}
    for split in COUNTS:
        images, masks[f"{split}_masks"] = random_split(split)
        rows = -(-len(images) // 20)
        tiles = np.zeros((rows * 20, HEIGHT, WIDTH, 3), dtype=np.uint8)
        tiles[: len(images)] = images
        mosaic = tiles.reshape(rows, 20, HEIGHT, WIDTH, 3).swapaxes(1, 2).reshape(rows * HEIGHT, 20 * WIDTH, 3)
        Image.fromarray(mosaic).save(tmp_path / f"{split}.webp", lossless=True, exact=True)
    np.savez(tmp_path / "masks.npz", **masks)
    return tmp_path


@pytest.fixture
def folders(tmp_path):
    for split in COUNTS:
        for folder, arrays in zip((split, f"{split}annot"), random_split(split), strict=True):
            (tmp_path / folder).mkdir()
            for number, array in enumerate(arrays):
                Image.fromarray(array).save(tmp_path / folder / f"{number:03}.png")
    return tmp_path


@pytest.mark.parametrize("layout", ["mosaics", "folders"])
def test_both_layouts_are_read_pixel_for_pixel(layout, request):
    data = CamVidData(str(request.getfixturevalue(layout)), batch_size=4, augment=False)
    data.setup("fit")
    for split, found in (("train", data.train_set), ("val", data.val_set)):
        images, masks = random_split(split)
        assert np.array_equal(found.images.permute(0, 2, 3, 1).numpy(), images)
        assert np.array_equal(found.masks.numpy(), masks)
    images, masks = next(iter(data.train_dataloader()))
    assert (images.shape, masks.shape) == ((4, 3, HEIGHT, WIDTH), (4, HEIGHT, WIDTH))
    assert (images.dtype, masks.dtype) == (torch.float32, torch.int64)


def test_images_are_mirrored_together_with_their_labels(mosaics):
    data = CamVidData(str(mosaics), batch_size=4)
    data.setup("fit")
    torch.manual_seed(0)
    plain, mask = data.val_set[0]
    data.val_set.augment = True
    seen = set()
    for _ in range(20):
        image, labels = data.val_set[0]
        seen.add((torch.equal(image, plain), torch.equal(labels, mask)))
    assert seen == {(True, True), (False, False)}
    assert data.train_set.augment


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"train_size": 3}, {"train_size": 24}])
def test_senseless_arguments_are_named(mosaics, arguments):
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        CamVidData(str(mosaics), **{"batch_size": 4} | arguments).setup("fit")


def test_a_folder_without_the_data_is_named(tmp_path):
    with pytest.raises(TrainingDataError, match=r"holds no CamVid.*trainannot"):
        CamVidData(str(tmp_path)).setup("fit")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 11, 1)

    def forward(self, images):
        return {"out": self.conv(images)}


def test_pixels_without_a_label_do_not_count(mosaics):
    data = CamVidData(str(mosaics), batch_size=5)
    model = ImageSegmenter(Net(), 11, partial(torch.optim.SGD, lr=0.1))
    trainer = trainer_of(epochs=1)
    trainer.fit(model, datamodule=data)
    images, masks = next(iter(data.val_dataloader()))
    with torch.no_grad():
        predicted = model(images).argmax(1)
    counted = masks != VOID
    ious = []
    for label in range(11):
        a, b = (predicted == label) & counted, (masks == label) & counted
        if (a | b).any():
            ious.append(float((a & b).sum() / (a | b).sum()))
    assert float(trainer.callback_metrics["val/miou"]) == pytest.approx(sum(ious) / len(ious), abs=1e-5)
    model.log = lambda *args, **kwargs: None
    counted[:, 0] = False
    pixels = nn.functional.cross_entropy(model(images), masks.clamp(max=10), reduction="none")[counted]
    loss = model.training_step((images, torch.where(counted, masks, VOID)), 0)
    torch.testing.assert_close(loss, pixels.mean())
