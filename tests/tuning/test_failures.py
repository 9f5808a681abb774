"""What a branch may fail of."""

import pytest

from lightning_egeria.tuning.failures import described, is_of_numbers_or_memory


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("CUDA out of memory."), "out of memory"),
        (RuntimeError("Function 'LogBackward0' returned nan values in its 0th output."), "not finite"),
    ],
)
def test_memory_and_numbers_are_known(error, kind):
    assert is_of_numbers_or_memory(error)
    assert described(error).startswith(f"{kind}: ")


def test_other_errors_are_not():
    assert not is_of_numbers_or_memory(ValueError("nan"))
