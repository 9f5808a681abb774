"""A graph pipeline trains as one process does; whoever fails ends all with one message."""

import pytest
import torch
from torch import nn

from lightning_egeria.errors import ArgumentError, PlanError, UnsupportedError
from lightning_egeria.methods.pipelining.graph import Node, chain_of
from lightning_egeria.methods.pipelining.pipeline import GraphPipeline
from lightning_egeria.methods.pipelining.plan import Plan, Stage
from lightning_egeria.methods.pipelining.planner import Limits
from support.pipelining.pipeline_runs import (
    FOUR,
    SIX,
    Branches,
    attends,
    data,
    killed,
    many_checks,
    random_pipelines,
    steps,
    train_beside_one_process,
)
from support.ranks import all_well, in_ranks


def test_one_process_trains_as_without_a_pipeline():
    plan = train_beside_one_process(None, 4)
    assert plan.devices == 1


@pytest.mark.slow
def test_four_ranks_train_as_one_and_fail_together():
    results = all_well(in_ranks(4, many_checks, FOUR, 4))
    first = results[0]
    assert [stage.name for stage in first["plan"].stages] == ["embed", "left", "right", "end"]
    assert first["plan"].in_flight == (3, 2, 2, 1)
    for found in results:
        assert found["dropout"] == pytest.approx(first["moved"])
        assert found["failure"] == "rank 3, stage 'end', failed: ValueError: the labels are wrong"
        for kind in ("broken", "new shape"):
            assert found[kind] == "rank 1, stage 'left', failed: ZeroDivisionError: division by zero"
        assert "got different batches" in found["batches"]
        assert found["state dict"].startswith("this process holds the weights of its stage only")
        assert found["module"] == found["state dict"]


def test_nothing_trains_under_no_grad():
    stages = {"target": ["target"], "attention": ["attention"], "end": ["head"]}
    owned = set()
    for gradients, expected, learns in all_well(in_ranks(3, attends, stages)):
        assert learns == (False, True, True)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        owned |= gradients.keys()
    assert owned == {name for name, gradient in expected.items() if gradient is not None}
    assert not any(name.startswith("target") for name in owned)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "size"), [(None, 2), (None, 4), (FOUR, 4), (SIX, 6)], ids=str)
def test_fifty_steps_stay_equal(stages, size):
    plans = all_well(in_ranks(size, steps, stages, size, 50, (stages is None and Limits(size, 4, max_width=1)) or None))
    assert len({plan.to_json() for plan in plans}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 3), (2, 2), (4,)], ids=str)
def test_devices_of_a_stage_share_its_micro_batches(widths):
    graph = GraphPipeline(Branches(norm=False).double(), data()).plan.graph
    numbers = range(len(graph.nodes))
    parts = (numbers,) if len(widths) == 1 else (numbers[:4], numbers[4:])
    stages = tuple(Stage(str(place), (*part,), widths[place]) for place, part in enumerate(parts))
    plans = all_well(in_ranks(4, steps, None, 4, 10, None, Plan(graph, stages, 4)))
    assert [stage.width for stage in plans[0].stages] == [*widths]


@pytest.mark.slow
def test_random_graphs_in_random_stages():
    tried = all_well(in_ranks(3, random_pipelines, 3, range(550)))
    assert tried == [tried[0]] * 3
    assert tried[0] >= 200


@pytest.mark.slow
def test_a_killed_rank_ends_the_others():
    results = in_ranks(4, killed, FOUR, 4)
    assert results.pop(2) is None
    for message, seconds in results:
        assert "connection to" in message or "failed: " in message
        assert seconds < 50


def build(**settings):
    return GraphPipeline(Branches(), data(), **settings)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"devices": 2}, ArgumentError, "devices must be the number of processes, 1, got 2"),
        ({"limits": Limits(3, 4)}, ArgumentError, "limits.devices must be the number of processes, 1"),
        ({"micro_batches": 0}, ArgumentError, "micro_batches must be at least 1, got 0"),
        ({"stages": {"a": ["nothing"]}}, ArgumentError, "no module 'nothing'"),
        ({"stages": {"a": ["left", "left.0"]}}, ArgumentError, "'left.0' is named twice, or is part of another"),
        ({"stages": {"a": ["embed"]}}, ArgumentError, "'left.0' has parameters or buffers and is in no stage"),
        ({"stages": FOUR}, PlanError, "stages for 4 processes, and there are 1"),
        ({"forward": lambda model, batch: batch[1].float()}, UnsupportedError, "depends on no module with parameters"),
    ],
)
def test_mistakes_are_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        build(**settings)


def test_a_plan_is_used_again_for_the_same_modules():
    plan = build(micro_batches=2).plan
    again = Plan.from_json(plan.to_json())
    assert build(plan=again).plan.stages == plan.stages
    assert build(plan=again).plan.micro_batches == 2
    other = Plan(chain_of([Node("other", 1, 2)]), (Stage("all", (0,)),), 2)
    with pytest.raises(PlanError, match="the plan is for other modules, expected"):
        build(plan=other)


def test_stages_in_a_circle_are_refused():
    stages = {**FOUR, "left": ["left", "head"], "end": ["norm", "words"]}
    with pytest.raises(PlanError, match=r"stages \['left', 'end'\] wait for each other in a circle"):
        build(stages=stages)


class Aliased(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, batch):
        x = y = self.first(batch)
        x += 1
        return self.second(x + y)


def test_a_trace_that_computes_something_else_is_refused():
    with pytest.raises(UnsupportedError, match="does not compute the same as the model"):
        GraphPipeline(Aliased(), torch.ones(4, 2))


def test_a_loss_must_be_a_number():
    with pytest.raises(Exception, match="loss_fn must return a tensor with one number, got tuple"):
        build(micro_batches=2).step(data(), lambda output, batch: output)
