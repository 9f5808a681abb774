"""Copies of tensors: exact, shared, and in files beyond a limit."""

import tempfile
from pathlib import Path

import pytest
import torch

from lightning_egeria.core.snapshots.tensor_store import TensorStore
from lightning_egeria.errors import ArgumentError, SnapshotError

TENSORS = {
    "float": torch.randn(3, 4),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex128),
    "number": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    "transposed": torch.randn(3, 4).T,
    "expanded": torch.arange(3.0).expand(2, 3),
}


def same(one, other):
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("most_bytes", [0, 10**6])
@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_is_exact_in_memory_and_in_a_file(name, most_bytes):
    store, tensor = TensorStore(most_bytes), TENSORS[name].clone()
    kept, before = store.keep(tensor), tensor.clone()
    tensor.zero_()
    store.settle()
    assert same(kept.values(), before)
    assert (store.memory_bytes, store.file_bytes) == ((0, before.nbytes) if most_bytes == 0 else (before.nbytes, 0))


def test_what_did_not_change_is_shared():
    store, tensor = TensorStore(10**6), torch.tensor([1.0, float("nan"), 0.0])
    first = store.keep(tensor)
    assert store.keep(tensor) is first
    assert store.memory_bytes == 12
    tensor[2] = -0.0  # equal, and another bit
    second = store.keep(tensor)
    assert second is not first
    assert store.memory_bytes == 24
    assert torch.signbit(second.values()).tolist() == [False, False, True]
    assert torch.signbit(first.values()).tolist() == [False, False, False]
    del second
    assert store.memory_bytes == 12


def test_the_longest_unused_copies_go_to_a_file(tmp_path):
    store = TensorStore(80, folder=str(tmp_path))
    kept = [store.keep(torch.full((10,), float(number))) for number in range(4)]
    kept[0].values()
    store.settle()
    assert [one.in_memory for one in kept] == [True, False, False, True]
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert [one.values()[0].item() for one in kept] == [0.0, 1.0, 2.0, 3.0]
    store.settle()
    assert (store.memory_bytes, store.file_bytes) == (80, 80)


FILES = Path("/proc/self/fd")


@pytest.mark.skipif(not FILES.is_dir(), reason="open files are listed by Linux only")
def test_a_file_is_closed_with_its_last_copy():
    store, before = TensorStore(0), len(list(FILES.iterdir()))
    kept = [store.keep(torch.ones(3)) for _ in range(2)]
    store.settle()
    assert len(list(FILES.iterdir())) == before + 1
    del kept
    assert len(list(FILES.iterdir())) == before


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path, monkeypatch):
    store = TensorStore(0, folder=str(tmp_path / "missing"))
    kept = store.keep(torch.ones(2))
    with pytest.raises(SnapshotError, match=r"8 bytes of the state of training .* cannot be written to .*missing"):
        store.settle()
    assert kept.values().tolist() == [1, 1]
    store, files, make = TensorStore(0, folder=str(tmp_path)), [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: files.append(make(**options)) or files[-1])
    kept = store.keep(torch.ones(2))
    store.settle()
    files[0].truncate(3)
    with pytest.raises(SnapshotError, match=r"8 bytes .* and 3 can be read"):
        kept.values()
    with pytest.raises(ArgumentError, match="most_bytes must be an integer of at least 0"):
        TensorStore(-1)
