"""What one rank computes, and what its edges carry."""

import torch
from pipeline_runs import FOUR, Branches, data, loss_fn

from lightning_egeria.pipelining.costs import measured_graph
from lightning_egeria.pipelining.executor import form_of
from lightning_egeria.pipelining.pipeline import GraphPipeline
from lightning_egeria.pipelining.plan import Plan, Stage
from lightning_egeria.pipelining.stages import Homes, works
from lightning_egeria.pipelining.tracing import TracedModel


def test_forms_are_shapes_and_dtypes():
    assert form_of({"x": torch.ones(2, 3)}) == form_of({"x": torch.zeros(2, 3)})
    assert form_of({"x": torch.ones(2, 3)}) != form_of({"x": torch.ones(2, 3, dtype=torch.int64)})


def test_each_stage_has_the_parameters_that_it_reads():
    model = Branches()
    traced = TracedModel(model, lambda model, batch: model(batch), [path for paths in FOUR.values() for path in paths])
    graph, groups = measured_graph(traced, model, data())
    home = {path: number for number, paths in enumerate(FOUR.values()) for path in paths}
    stages = tuple(
        Stage(name, tuple(node for node, group in enumerate(groups) if group[0] in paths))
        for name, paths in FOUR.items()
    )
    homes = Homes(traced, Plan(graph, stages, 2), home, 3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [sorted(names[one] for one in work.parameters) for work in works(homes, 0, recompute=False)]
    assert found[0] == ["embed.weight"]
    assert "scale" in found[1]
    assert "scale" in found[2]
    assert "embed.weight" in found[3]  # tied


def test_after_a_failure_no_gradient_is_computed():
    model = Branches()
    pipeline = GraphPipeline(model, data(), micro_batches=2)
    parts = [(data(5), 0.5), (data(5), 0.5)]
    assert pipeline._executor.learn_forms(data(5)) is None
    result = pipeline._executor.step(parts, lambda output, batch: output, 1)
    assert "loss_fn must return a tensor" in str(result.failure)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert pipeline._executor.step(parts, loss_fn, 2).failure is None
