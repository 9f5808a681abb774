"""Linear layers of frozen attention."""

import pytest
import torch
from torch import nn

from lightning_egeria.network.folding import folded


@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_input_is_multiplied_as_a_contiguous_one(bias):
    linear = nn.Linear(4, 3, bias=bias).requires_grad_(False).bfloat16()
    x = torch.randn(5, 2, 4).bfloat16().transpose(0, 1)
    found = folded(linear, x)
    assert found.equal(torch.mm(x.flatten(0, 1), linear.weight.T).unflatten(0, (2, 5)) + (linear.bias if bias else 0))
    assert (found.shape, found.stride(), found.dtype) == ((2, 5, 3), linear(x).stride(), torch.bfloat16)


def test_attention_is_the_same_to_rounding():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True).requires_grad_(False)
    x = torch.randn(8, 5, 16)
    padding = torch.arange(5).expand(8, 5) > 3
    with torch.autocast("cpu", torch.bfloat16):
        found = folded(layer, x, src_key_padding_mask=padding)
        expected = layer(x, src_key_padding_mask=padding)
    assert found.sub(expected).abs().max() < 0.05
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_batches_of_matrices_are_left_alone():
    first, second = torch.randn(3, 2, 4), torch.randn(3, 4, 5)
    assert folded(torch.bmm, first, second).equal(torch.bmm(first, second))
    assert folded(torch.bmm, first[:0], second[:0]).shape == (0, 2, 5)
