"""What ranks send each other; `test_pipeline.py` has real ones."""

from typing import NamedTuple

import pytest
import torch

from lightning_egeria.errors import PipelineError, UnsupportedError
from lightning_egeria.methods.pipelining.messages import check_sendable, lost_connection


class Named(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor | None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_trees_of_tensors_can_be_sent(dtype):
    leaf = torch.zeros(2, 3, dtype=dtype)
    check_sendable({"a": [leaf, (leaf, leaf)]})
    check_sendable(leaf)
    check_sendable((leaf, None))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", "str"),
        ([torch.zeros(2), 3], "int"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (Named(torch.zeros(2), None), "a tree with Named"),
        ({(0, 1): torch.zeros(2)}, "a tree with dict"),
    ],
)
def test_other_values_are_refused(value, kind):
    with pytest.raises(UnsupportedError, match=f"returns .*{kind}, which cannot be sent to another stage"):
        check_sendable(value)


def test_a_lost_connection_names_the_rank():
    with pytest.raises(PipelineError, match="lost the connection to rank 3"), lost_connection("rank 3"):
        raise RuntimeError("Connection closed by peer")
