"""A training step is cut at its last call of a unit; the rest runs on what was computed."""

import pytest
import torch

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.tracing import TracedModel
from lightning_egeria.methods.pipelining.training_step import TrainingStep
from lightning_egeria.methods.pipelining.units import find_units
from support.pipelining.strategy_runs import TwoTowers, examples

BATCH = examples()[:4]


def parts(module):
    step = TrainingStep(module, (3,))
    units = find_units(module, 0)
    return step, TracedModel(module, step, units, step.cut(units, BATCH))


def test_the_rest_of_the_step_sees_the_outputs_that_it_reads():
    module = TwoTowers()
    step, traced = parts(module)
    read = [traced.unit_of[node] for node in traced.reads(traced.output)]
    assert read == ["image.3", "head"]  # the logged length, and the logits
    values = {}
    for node in traced.nodes:
        values[node] = traced.evaluate(node, values, BATCH)
    output = values[traced.output]
    for one, other in zip(output, step.expected(BATCH), strict=True):
        assert torch.equal(one, other)
    module.log = lambda *_, **__: None
    expected = module.training_step(BATCH, 3)["loss"]
    assert torch.equal(step.loss(output, BATCH), expected)
    assert [(name, samples) for name, _, _, samples in step.logged[:3]] == [("length", 4), ("loss", 4), ("right", 4)]
    assert step.logged[1][1] == pytest.approx(float(expected.detach()))
    assert step.logged[1][2] == {"on_step": True, "on_epoch": True, "prog_bar": True}


class Auxiliary(TwoTowers):
    """Reads another output from some epoch on."""

    epoch = 0

    def training_step(self, batch, batch_idx):
        image = self.image(batch[0])
        logits = self.head(torch.cat([image, self.text(batch[1])], 1))
        return logits.square().mean() + (image.square().mean() if self.epoch else 0)


def test_an_output_that_was_not_read_before_is_refused():
    module = Auxiliary()
    step, _ = parts(module)
    output = step.expected(BATCH)
    step.loss(output, BATCH)
    module.epoch = 1
    with pytest.raises(UnsupportedError, match="the loss reads the output of a module that the first run"):
        step.loss(output, BATCH)


def test_the_module_is_as_before():
    module = TwoTowers()
    before = {**vars(module)}
    parts(module)
    assert {**vars(module)} == before
    assert "forward" not in vars(module.head)
