"""What a stage computes; what it reads is in `test_executor.py`."""

from lightning_egeria.methods.pipelining.costs import measured_graph
from lightning_egeria.methods.pipelining.plan import plan_of_named
from lightning_egeria.methods.pipelining.stages import Placement, rank_stages
from lightning_egeria.methods.pipelining.tracing import TracedModel
from support.pipelining.pipeline_runs import FOUR, Branches, data


def test_only_stages_without_the_loss_recompute():
    model = Branches()
    traced = TracedModel(model, lambda model, batch: model(batch), [path for paths in FOUR.values() for path in paths])
    graph, groups = measured_graph(traced, model, data())
    placement = Placement(traced, plan_of_named(graph, groups, FOUR, 2, 1), dict(zip(FOUR, range(4), strict=True)), 3)
    placement.stage_of.update({path: place for place, paths in enumerate(FOUR.values()) for path in paths})
    ranks = rank_stages(placement, 0, recompute=True)
    assert [work.recomputes for work in ranks] == [True, True, True, False]
    assert [len(work.buffers()) for work in ranks] == [0, 3, 0, 0]
    assert [work.has_loss for work in ranks] == [False, False, False, True]
