import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from lightning_egeria.demos.data import Cifar10Data, DigitsData, FolderData
from lightning_egeria.errors import ArgumentError, TrainingDataError

PER_SPLIT = {"train": 200, "test": 100}


def random_images(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images `[N, 32, 32, 3]` and labels `[N]`, the same at each call."""
    size = PER_SPLIT[split]
    generator = np.random.default_rng(size)
    return generator.integers(256, size=(size, 32, 32, 3), dtype=np.uint8), np.arange(size, dtype=np.uint8) % 10


@pytest.fixture
def mosaics(tmp_path):
    labels = {}
    for split in PER_SPLIT:
        images, labels[f"{split}_labels"] = random_images(split)
        names = [f"{split}_{k}" for k in range(2)] if split == "train" else [split]
        for name, part in zip(names, np.split(images, len(names)), strict=True):
            mosaic = part.reshape(10, 10, 32, 32, 3).swapaxes(1, 2).reshape(320, 320, 3)
            Image.fromarray(mosaic).save(tmp_path / f"{name}.webp", lossless=True, exact=True)
    np.savez(tmp_path / "labels.npz", **labels)
    return tmp_path


@pytest.fixture
def torchvision_folder(tmp_path, monkeypatch):
    """torchvision's layout with few images; its checksums are those of the full files, so they are not asked."""
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}
    for split in PER_SPLIT:
        images, labels = random_images(split)
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        for i, name in enumerate(names[split]):
            part = slice(i * len(rows) // len(names[split]), (i + 1) * len(rows) // len(names[split]))
            content = {"data": rows[part], "labels": labels[part].tolist()}
            (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return tmp_path


def test_digits_are_split_by_class_normalised_and_shown_at_32():
    data = DigitsData(batch_size=64)
    data.setup("fit")

    assert (len(data.train_set), len(data.val_set)) == (1437, 360)
    assert not set(data.train_set.indices) & set(data.val_set.indices)
    counts = torch.bincount(torch.tensor([label for _, label in data.val_set]))
    assert counts.min() >= 34
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (64, 3, 32, 32)
    assert labels.dtype == torch.int64
    everything = torch.stack([image for image, _ in data.train_set])
    assert abs(everything.mean()) < 0.01
    assert abs(everything.std() - 1) < 0.01
    assert torch.equal(images[:, 0], images[:, 2])


def test_digits_with_one_channel_and_another_seed():
    first, second = DigitsData(channels=1, split_seed=1), DigitsData(channels=1, split_seed=2)
    first.setup("fit")
    second.setup("fit")

    assert first.train_set[0][0].shape == (1, 32, 32)
    assert set(first.val_set.indices) != set(second.val_set.indices)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"val_fraction": 0.0}, {"val_fraction": 1}])
def test_digits_refuses_senseless_arguments(arguments):
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        DigitsData(**arguments)


@pytest.mark.parametrize("layout", ["mosaics", "torchvision_folder"])
def test_cifar10_reads_both_layouts_pixel_for_pixel(layout, request):
    root = request.getfixturevalue(layout)
    data = Cifar10Data(root=str(root), batch_size=10, val_size=50, augment=False)
    data.setup("fit")
    data.setup("test")

    images, labels = random_images("test")
    assert np.array_equal(data.test_set.images.permute(0, 2, 3, 1).numpy(), images)
    assert data.test_set.labels.tolist() == labels.tolist()
    assert next(iter(data.test_dataloader()))[0].shape == (10, 3, 32, 32)

    # Every training image is in exactly one of the two sets, with its label.
    images, labels = random_images("train")
    label_of = {image.tobytes(): label for image, label in zip(images, labels.tolist(), strict=True)}
    for part in (data.train_set, data.val_set):
        for image, label in zip(
            part.images.permute(0, 2, 3, 1).contiguous().numpy(), part.labels.tolist(), strict=True
        ):
            assert label_of.pop(image.tobytes()) == label
    assert not label_of
    assert torch.bincount(data.val_set.labels).tolist() == [5] * 10


def test_cifar10_trains_on_a_class_balanced_part(mosaics):
    data = Cifar10Data(root=str(mosaics), batch_size=10, val_size=50, train_size=40)
    data.setup("fit")

    assert torch.bincount(data.train_set.labels).tolist() == [4] * 10
    assert data.train_set.augment
    assert not data.val_set.augment
    assert len(data.train_dataloader()) == 4


def test_cifar10_is_resized_and_scaled(mosaics):
    data = Cifar10Data(str(mosaics), 10, val_size=50, augment=False, size=48, mean=(0.5,) * 3, std=(0.5,) * 3)
    data.setup("fit")
    image, _ = data.val_set[0]
    plain = Cifar10Data(str(mosaics), 10, val_size=50, augment=False)
    plain.setup("fit")
    expected = interpolate(plain.val_set.images[:1].float(), size=(48, 48), mode="bilinear", align_corners=False)
    assert torch.allclose(image, expected[0] / 127.5 - 1, atol=0.01)  # pixels are rounded


@pytest.mark.parametrize("train_size", [9, 151])
def test_cifar10_refuses_a_part_that_cannot_be_had(mosaics, train_size):
    data = Cifar10Data(root=str(mosaics), batch_size=10, val_size=50, train_size=train_size)
    with pytest.raises(ArgumentError, match="train_size must lie between"):
        data.setup("fit")


def test_a_folder_without_cifar10_is_named_with_both_layouts(tmp_path):
    data = Cifar10Data(root=str(tmp_path))
    with pytest.raises(TrainingDataError, match=r"cifar-10-batches-py.*labels\.npz") as error:
        data.setup("fit")
    assert str(tmp_path) in str(error.value)


def test_missing_mosaics_are_an_error(mosaics):
    (mosaics / "train_1.webp").unlink()
    with pytest.raises(TrainingDataError, match=r"200 labels for train.* have 100 tiles"):
        Cifar10Data(root=str(mosaics), val_size=50).setup("fit")


def test_worker_processes_deliver_the_same_batches_and_end(mosaics):
    def batches(num_workers):
        data = Cifar10Data(root=str(mosaics), batch_size=10, val_size=50, num_workers=num_workers)
        data.setup("fit")
        return list(data.val_dataloader())

    for (images, labels), (same_images, same_labels) in zip(batches(0), batches(1), strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)


@pytest.fixture
def image_folder(tmp_path):
    """Two classes of images, wider than high, with their class as the brightness of the middle."""
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.zeros((20, 30, 3), dtype=np.uint8)
                pixels[:, 5:25] = 100 * (label + 1)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def test_a_folder_of_images_is_cut_to_squares_in_the_middle(image_folder):
    data = FolderData(str(image_folder), size=10, batch_size=4, augment=False)
    data.setup("fit")

    assert (len(data.train_set), len(data.val_set)) == (16, 6)
    assert data.train_set.images.shape == (16, 3, 10, 10)
    for image, label in zip(data.train_set.images, data.train_set.labels, strict=True):
        assert (image == 100 * (int(label) + 1)).all()
    images, labels = next(iter(data.val_dataloader()))
    expected = (100 * (labels[0] + 1) / 255 - 0.485) / 0.229
    assert torch.allclose(images[0, 0], expected)


def test_a_folder_of_images_in_part(image_folder):
    data = FolderData(str(image_folder), size=10, batch_size=4, train_size=6)
    data.setup("fit")
    assert torch.bincount(data.train_set.labels).tolist() == [3, 3]
    assert data.train_set.augment
    with pytest.raises(ArgumentError, match="train_size must lie between"):
        FolderData(str(image_folder), size=10, batch_size=4, train_size=17).setup("fit")


def test_a_folder_without_images_is_named(image_folder):
    with pytest.raises(TrainingDataError, match=r"nowhere.*train/CLASS"):
        FolderData(str(image_folder / "nowhere")).setup("fit")
