"""Activations as rows, and what comes back of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_egeria.caching.store.rows import LARGEST_STEP, RowForm

BATCHES = {
    "vectors": torch.randn(4, 6),
    "images": torch.randn(4, 3, 5, 7),
    "channels last": torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
    "numbers": torch.randn(4),
    "texts": torch.randn(4, 5, 6),
    "transposed": torch.randn(4, 5, 6).transpose(1, 2),
    "bfloat16": torch.randn(4, 3, 2).to(torch.bfloat16),
    "float16": ((2 * torch.rand(4, 3, 2) - 1) * 6.5e4).to(torch.float16),
}


@pytest.mark.parametrize("precision", [None, "bf16", "int8"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_what_comes_back_is_near(batch, precision):
    form = RowForm.of(batch, precision)
    rows = form.to_memory(batch)
    assert rows.is_contiguous()
    assert (tuple(rows.shape[1:]), rows.dtype) == (form.stored_shape, form.stored_dtype)
    assert rows[0].nbytes == form.row_bytes
    back = form.rounded(batch)
    assert (back.shape, back.stride(), back.dtype) == (batch.shape, batch.stride(), batch.dtype)
    assert back.equal(form.from_memory(rows))
    assert back.equal(batch) or form.rounds
    assert (back.float() - batch.float()).abs().max() <= LARGEST_STEP * batch.float().abs().max()
    assert form.rounded(back).equal(back)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_rounding_twice_is_rounding_once(values):
    batch = torch.tensor(values)[None, None]
    for precision in ("bf16", "int8"):
        form = RowForm.of(batch, precision)
        once = form.rounded(batch)
        assert form.rounded(once).equal(once)
        assert precision == "bf16" or form.to_memory(once).equal(form.to_memory(batch)) or not once.any()
        assert precision == "bf16" or once.isfinite().all()


def test_each_channel_of_each_sample_has_its_scale():
    batch = torch.tensor([1.0, 100.0, 1e-6, 0.0]).view(2, 2, 1, 1) * torch.randn(2, 2, 4, 4)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = batch.to(memory_format=memory_format)
        back = RowForm.of(given, "int8").rounded(given)
        largest = batch.abs().amax((2, 3), keepdim=True)
        assert ((back - batch).abs() <= LARGEST_STEP * largest).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_stored_in_eight_bits(value):
    batch = torch.tensor([[[1.0, value]]])
    form = RowForm.of(batch, "int8")
    assert not form.fits(batch)
    assert form.rounded(batch) is batch


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_whole_numbers_are_stored_as_they_are(dtype):
    batch = torch.ones(2, 3, dtype=dtype)
    for precision in ("bf16", "int8"):
        form = RowForm.of(batch, precision)
        assert not form.rounds
        assert form.rounded(batch) is batch
        assert form.to_memory(batch).equal(batch)
