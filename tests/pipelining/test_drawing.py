"""The picture of timelines."""

from lightning_egeria.methods.pipelining.drawing import timelines
from lightning_egeria.methods.pipelining.planner import Limits, plan_chain, plan_graph
from lightning_egeria.methods.pipelining.timeline import predict
from support.pipelining.graphs import branches


def test_each_timeline_has_its_axes_and_bars():
    limits = Limits(devices=6, micro_batches=4, max_width=1)
    drawn = {"graph": predict(plan_graph(branches(4), limits)), "chain": predict(plan_chain(branches(4), limits))}
    figure = timelines(drawn)
    first, second = figure.axes
    assert len(first.patches) == len(second.patches) == 6 * 4 * 2
    assert first.get_title() == "graph: 360 ms, idle 33%"
    assert first.get_xlim() == second.get_xlim()
