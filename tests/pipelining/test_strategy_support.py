"""What is logged must reach other processes; refused set-ups are in `test_strategy.py`."""

import pytest
import torch

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.strategy_support import check_logged


def test_arguments_of_log_that_cannot_be_sent_are_refused():
    assert check_logged("loss", {"prog_bar": True, "reduce_fx": "max"}) == {"prog_bar": True, "reduce_fx": "max"}
    with pytest.raises(UnsupportedError, match="must get a number or a name in a graph pipeline, got"):
        check_logged("loss", {"reduce_fx": torch.max})
