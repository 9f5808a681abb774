"""A model is traced, checked and measured, and stays as it was."""

import pytest
import torch

from lightning_egeria.methods.pipelining.preparation import prepared
from support.pipelining.pipeline_runs import Branches, data


@pytest.mark.parametrize("norm", [True, False])
def test_the_model_stays_as_it_was(norm):
    model = Branches(dropout=0.5, norm=norm)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = prepared(model, lambda model, batch: model(batch), data(), None, processes=2)
    assert found.has_statistics == norm
    assert torch.equal(random, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_graph_follows_what_trains():
    model = Branches()
    found = prepared(model, lambda model, batch: model(batch), data(), None, processes=2)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    graph = found.graph(recompute=False)
    # The loss is beside the last unit.
    assert [node.name for node in graph.nodes if node.backward_s > 0] == ["head", "words"]
