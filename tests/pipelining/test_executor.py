"""What one rank computes, and what its edges carry."""

import torch

from lightning_egeria.methods.pipelining.costs import measured_graph
from lightning_egeria.methods.pipelining.executor import StageExecutor, form_of
from lightning_egeria.methods.pipelining.plan import Plan, Stage
from lightning_egeria.methods.pipelining.stages import Placement, rank_stages
from lightning_egeria.methods.pipelining.tracing import TracedModel
from support.pipelining.pipeline_runs import FOUR, Branches, data, loss_fn


def test_forms_are_shapes_and_dtypes():
    assert form_of({"x": torch.ones(2, 3)}) == form_of({"x": torch.zeros(2, 3)})
    assert form_of({"x": torch.ones(2, 3)}) != form_of({"x": torch.ones(2, 3, dtype=torch.int64)})


ONE = {"all": [path for paths in FOUR.values() for path in paths]}


def placement_of(model, parts):
    """Where the operations of a model run, whose last stage computes the loss."""
    traced = TracedModel(model, lambda model, batch: model(batch), ONE["all"])
    graph, groups = measured_graph(traced, model, data())
    home = {path: number for number, paths in enumerate(parts.values()) for path in paths}
    stages = tuple(
        Stage(name, tuple(node for node, group in enumerate(groups) if group[0] in paths))
        for name, paths in parts.items()
    )
    return Placement(traced, Plan(graph, stages, 2), home, len(parts) - 1)


def test_each_stage_has_the_parameters_that_it_reads():
    model = Branches()
    placement = placement_of(model, FOUR)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [sorted(names[one] for one in work.parameters) for work in rank_stages(placement, 0, recompute=False)]
    assert found[0] == ["embed.weight"]
    assert "scale" in found[1]
    assert "scale" in found[2]
    assert "embed.weight" in found[3]  # tied


def test_after_a_failure_no_gradient_is_computed():
    model = Branches()
    executor = StageExecutor(*rank_stages(placement_of(model, ONE), 0, recompute=False))
    parts = [(data(5), 0.5), (data(5), 0.5)]
    assert executor.learn_forms(data(5)) is None
    result = executor.step(parts, lambda output, batch: output, 1)
    assert "loss_fn must return a tensor" in str(result.failure)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert executor.step(parts, loss_fn, 2).failure is None
