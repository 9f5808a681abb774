"""Digests: equal for equal tensors, different for every difference that counts."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.snapshots.digests import Copies, bytes_of, digest, with_gaps

BASE = torch.arange(12, dtype=torch.float32).view(3, 4)


def one_bit_changed():
    value = BASE.clone()
    value.view(torch.int32)[2, 3] ^= 1
    return value


def test_of_equal_tensors_is_equal():
    assert digest({"a": BASE}) == digest({"a": BASE.clone()})
    assert len(digest({"a": BASE})) == 16


@pytest.mark.parametrize(
    "other",
    [
        {"b": BASE},
        {"a": BASE.double()},
        {"a": BASE.view(4, 3)},
        {"a": BASE.view(torch.int32)},
        {"a": one_bit_changed()},
        {"a": BASE, "b": torch.empty(0)},
        {"a": BASE[:2]},
        {},
    ],
    ids=["name", "dtype", "shape", "reinterpreted", "one bit", "one more", "one row less", "nothing"],
)
def test_of_anything_else_differs(other):
    assert digest(other) != digest({"a": BASE})


def test_values_count_whatever_the_layout_in_memory():
    turned = BASE.T.contiguous().T
    assert turned.stride() != BASE.stride()
    assert digest({"a": turned}) == digest({"a": BASE})
    assert digest({"a": BASE.expand(2, 3, 4)}) == digest({"a": BASE.repeat(2, 1, 1)})
    assert digest({"a": BASE.to_sparse().to_dense()[:, ::2]}) == digest({"a": BASE[:, [0, 2]]})


def test_borders_between_tensors_count():
    first = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 3.0])}
    second = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    assert digest(first) != digest(second)
    assert digest({"ab": BASE, "c": BASE}) != digest({"a": BASE, "bc": BASE})


def test_parameters_are_read_without_a_graph():
    layer = nn.Linear(2, 2)
    before = digest(dict(layer.named_parameters()))
    with torch.no_grad():
        layer.weight += 1
    assert digest(dict(layer.named_parameters())) != before
    assert layer.weight.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.complex64])
def test_bytes_of_every_kind(dtype):
    value = torch.tensor([0, 1, 1], dtype=dtype)
    assert bytes_of(value) == value.view(torch.uint8).numpy().tobytes()


def test_bytes_of_special_tensors():
    assert bytes_of(torch.empty(0, 3)) == b""
    assert bytes_of(torch.tensor(7, dtype=torch.uint8)) == b"\x07"
    value = torch.tensor([1 + 2j])
    assert bytes_of(value.conj()) == bytes_of(torch.tensor([1 - 2j]))
    assert bytes_of(torch.tensor([float("nan")])) == bytes_of(torch.tensor([float("nan")]))
    assert bytes_of(torch.tensor([0.0])) != bytes_of(torch.tensor([-0.0]))


def test_of_a_sharded_tensor_only_the_name_counts():
    class Shard(torch.Tensor):
        def full_tensor(self):
            return self

    first, second = (torch.full((2,), value).as_subclass(Shard) for value in (1.0, 2.0))
    assert digest({"a": first}) == digest({"a": second}) != digest({"b": first})


KINDS = [
    torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns", "every second", "one value"])
def test_copies_see_a_single_value(kind, layout):
    made = torch.arange(48).view(6, 8).to(kind)
    tensors = {"rows": made, "columns": made.T, "every second": made[:, ::2], "one value": made[3, 3]}
    changed = tensors[layout]
    copies = Copies([torch.ones(3), changed, torch.empty(0), torch.tensor(float("nan"))])
    assert copies.agree()
    changed.data.view(-1)[-1:].zero_() if layout in ("rows", "one value") else changed.data[-1].zero_()
    assert not copies.agree()


def test_copies_gather_in_groups(monkeypatch):
    monkeypatch.setattr("lightning_egeria.core.snapshots.digests.GROUP_BYTES", 100)
    tensors = [torch.zeros(size) for size in (3, 30, 1, 60, 2)]
    for tensor in tensors:
        copies = Copies(tensors)
        assert copies.agree()
        tensor[-1] = -0.0
        assert not copies.agree()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., 1].unsqueeze(-1)[:, 1:],
        lambda x: x.t(),
        lambda x: x[:1].expand(3, 5),
        lambda x: x.as_strided((2, 2), (0, 3)),
        lambda x: x[:0],
        lambda x: x,
    ],
)
def test_a_copy_has_the_strides_of_a_view(view):
    x = torch.arange(20.0).view(4, 5)
    found = with_gaps(view(x.clone()), 100)
    assert torch.equal(found, view(x))
    assert found.stride() == view(x).stride() or found.numel() == 0
    assert with_gaps(x[:, 1], 8).is_contiguous()
