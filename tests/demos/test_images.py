import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_egeria.demos.images import LabelledImages, balanced_prefix, shift_and_flip


def test_samples_are_normalised_per_channel():
    images = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    dataset = LabelledImages(images, torch.tensor([4]), mean=(0.5, 0.0, 1.0), std=(0.5, 2.0, 1.0))

    image, label = dataset[0]

    assert label == 4
    assert image.dtype == torch.float32
    assert image.amax(dim=(1, 2)).tolist() == [1.0, 0.5, 0.0]


def test_samples_differ_only_with_augmentation():
    images = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8)
    plain = LabelledImages(images, torch.tensor([0]), (0.5,) * 3, (0.5,) * 3)
    augmented = LabelledImages(images, torch.tensor([0]), (0.5,) * 3, (0.5,) * 3, augment=True)

    assert torch.equal(plain[0][0], plain[0][0])
    assert len({augmented[0][0].numpy().tobytes() for _ in range(20)}) > 10


def test_shift_and_flip_only_moves_mirrors_and_fills_with_zeros():
    image = torch.arange(1.0, 65.0).view(1, 8, 8)
    canvas = torch.nn.functional.pad(image, (4,) * 4)
    cuts = [canvas[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
    possible = {cut.numpy().tobytes() for cut in cuts} | {cut.flip(-1).numpy().tobytes() for cut in cuts}

    seen = {shift_and_flip(image).contiguous().numpy().tobytes() for _ in range(300)}

    assert seen <= possible
    assert len(seen) > 100


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=60), data=st.data())
def test_balanced_prefix_is_ascending_and_balanced(labels, data):
    size = data.draw(st.integers(0, len(labels)))

    indices = balanced_prefix(torch.tensor(labels), size).tolist()

    assert len(indices) == size
    assert indices == sorted(set(indices))
    taken = [labels[i] for i in indices]
    largest = max((taken.count(label) for label in set(labels)), default=0)
    for label in set(labels):
        count = taken.count(label)
        assert count >= largest - 1 or count == labels.count(label)
        of_class = [i for i, value in enumerate(labels) if value == label]
        assert [i for i in indices if labels[i] == label] == of_class[:count]


@pytest.mark.parametrize("size", [10, 20])
def test_balanced_prefix_of_balanced_blocks_is_the_plain_prefix(size):
    assert balanced_prefix(torch.arange(100) % 10, size).tolist() == list(range(size))
