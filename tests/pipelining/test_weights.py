"""Weights of other stages; how they move between processes is in `test_pipeline.py`."""

import pytest
import torch

from lightning_egeria.errors import PipelineError
from lightning_egeria.methods.pipelining.messages import Processes
from lightning_egeria.methods.pipelining.weights import StageWeights
from support.pipelining.pipeline_runs import Branches


class Second(Processes):
    """Rank 1 of 2, which talks to nobody."""

    def __init__(self):
        super().__init__()
        self.rank, self.size = 1, 2

    def broadcast(self, tensor, source=0):
        return tensor.zero_() if source != self.rank else tensor

    def gather(self, tensor):
        return [tensor]

    def group(self, ranks):
        return None


def held(model):
    return {name for name, p in model.named_parameters() if p.untyped_storage().nbytes() == p.nbytes}


def test_what_others_hold_is_freed_and_cannot_be_used_by_mistake():
    model, shape = Branches(), (8, 8)
    holders = {name: (0,) if name.startswith("left") else (1,) for name, _ in model.named_parameters()}
    weights = StageWeights(model, Second(), holders, [model.left])
    model.left[0].weight.grad = torch.ones(shape)
    weights.release()
    assert held(model) == {name for name, ranks in holders.items() if ranks == (1,)}
    assert model.left[0].weight.shape == shape
    assert model.left[0].weight.grad is None
    assert model.left[0].weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        model.left[0].weight.data.add_(1)
    for use in (lambda: model.left(torch.ones(2, 8)), model.state_dict):
        with pytest.raises(PipelineError, match=r"holds the weights of its stage only\. Call gather"):
            use()
    weights.gather()
    assert held(model) == {*holders}
    assert not model.state_dict()["left.0.weight"].any()
    assert model.left(torch.ones(2, 8)).shape == (2, 8)


def test_optimizers_keep_the_state_of_their_stage():
    model = Branches()
    holders = {name: (0,) if name.startswith("left") else (1,) for name, _ in model.named_parameters()}
    weights = StageWeights(model, Second(), holders, [])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for name, p in model.named_parameters() if holders[name] == (1,))
    assert weights.gradient_norm() == pytest.approx(count**0.5)
    optimizer.step()
    weights.keep_own_state([optimizer])
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in optimizer.state} == {name for name, ranks in holders.items() if ranks == (1,)}
