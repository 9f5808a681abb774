"""What is known of a tensor without its values."""

import pytest
import torch

from lightning_egeria.caching.record.meta import Meta, stacked, version_of


def test_meta_makes_a_tensor_like_the_first():
    tensor = torch.zeros(3, 2, dtype=torch.int16).t()
    meta = Meta.of(tensor)
    assert Meta.of(meta.empty()) == meta
    assert meta.empty("meta").is_meta


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(())])
def test_meta_of_a_stack(tensor):
    assert stacked(Meta.of(tensor), 4) == Meta.of(torch.stack([tensor] * 4))


def test_version_rises_with_each_change_in_place():
    tensor = torch.zeros(3)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) > before


def test_tensor_of_inference_mode_has_no_version():
    with torch.inference_mode():
        assert version_of(torch.zeros(3)) == 0
