"""What a loss must be; that all ranks compute alike is in `test_pipeline.py`."""

import pytest
import torch
from torch import nn

from lightning_egeria.errors import PipelineError, UnsupportedError
from lightning_egeria.methods.pipelining.pipeline import GraphPipeline
from support.pipelining.pipeline_runs import Branches, data, loss_fn

temperature = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, batch: None, "must return a tensor with one number, got NoneType"),
        (lambda output, batch: output[0], "must return a tensor with one number, got Tensor"),
        (lambda output, batch: output[0].sum().detach(), "depends on no parameter that trains"),
        (lambda output, batch: loss_fn(output, batch) * temperature, "reads a parameter of shape .. that this stage"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(loss, message):
    model = Branches()
    pipeline = GraphPipeline(model, data(), micro_batches=2)
    model.head.bias.grad = torch.ones(3)
    with pytest.raises(PipelineError, match=message):
        pipeline.step(data(), loss)
    assert torch.equal(model.head.bias.grad, torch.ones(3))
    assert model.head.weight.grad is None  # gradients are as before


def test_a_model_that_is_frozen_is_refused():
    model = Branches()
    pipeline = GraphPipeline(model, data(), micro_batches=2)
    model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="no parameter of the model trains"):
        pipeline.step(data(), loss_fn)


def test_other_parameters_are_refused():
    model = Branches()
    pipeline = GraphPipeline(model, data(), micro_batches=2)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(UnsupportedError, match="other parameters than when the pipeline was created"):
        pipeline.step(data(), loss_fn)
