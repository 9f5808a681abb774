"""One process alone; several are in `test_pipeline.py`."""

import torch

from lightning_egeria.pipelining.processes import Processes


def test_one_process_hears_itself():
    alone = Processes()
    assert not alone.several
    assert alone.texts("plan") == ["plan"]
    assert alone.text("") == ""
    assert alone.gathered(torch.tensor(3)) == [torch.tensor(3)]
