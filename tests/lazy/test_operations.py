"""All operations that torch itself tests give the same on lazy tensors as on plain ones."""

import contextlib
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

from support.caching.lazies import described, lazy

SAMPLES = 8  # of each operation
# Their values are whatever the memory holds.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# The kernel without values says that its statistics are in float32, the one for the CPU has them in bfloat16.
OTHER_FORM = ("native_layer_norm",)
ON_GPUS = "jiterator"


def is_comparable(name):
    return name not in UNDEFINED + OTHER_FORM and not name.startswith(ON_GPUS)


def copied(tree):
    return pytree.tree_map_only(torch.Tensor, _copied, tree)


def _copied(tensor):
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.layout is torch.strided else tensor.clone()


def made_lazy(tree):
    return pytree.tree_map_only(torch.Tensor, lambda x: lazy(x) if _can_be_rows(x) else x, copied(tree))


def _can_be_rows(tensor):
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dim() > 0 and len(tensor) > 0


def differences(operation, dtype):
    """Yield what differs, for the operation and its form in place."""
    for function in filter(None, (operation.op, operation.inplace_variant)):
        for number, sample in enumerate(operation.sample_inputs("cpu", dtype)):
            if number == SAMPLES:
                break
            arguments = sample.input, sample.args, sample.kwargs
            wanted = result(function, *copied(arguments))
            if wanted is None:
                continue
            mixed = made_lazy(sample.input), *copied(arguments[1:])
            for made in (mixed, made_lazy(arguments)):
                if (found := result(function, *made)) != wanted:
                    yield f"{operation.name}, {dtype}, sample {number}: {found!s:.100} instead of {wanted:.100}"


def result(function, first, others, options):
    """What a function returns, and what its first argument is then; None if it fails."""
    torch.manual_seed(0)
    with contextlib.suppress(RuntimeError, TypeError, IndexError):
        return repr(described((function(first, *others, **options), first)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_operations_of_torch_are_the_same(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    operations = [one for one in op_db if dtype in one.dtypes and is_comparable(one.name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch is about to change
        found = [text for operation in operations for text in differences(operation, dtype)]
    assert len(operations) > 300
    assert not found, "\n".join(found)
