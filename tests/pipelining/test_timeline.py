"""Predicted timelines of plans whose step can be counted by hand."""

import pytest

from lightning_egeria.methods.pipelining.graph import Node, chain_of
from lightning_egeria.methods.pipelining.plan import Plan, Stage
from lightning_egeria.methods.pipelining.timeline import predict
from support.pipelining.graphs import branches


def each(graph, micro_batches, **settings):
    return Plan(graph, tuple(Stage(n.name, (i,)) for i, n in enumerate(graph.nodes)), micro_batches, **settings)


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_a_step_fills_runs_and_drains(micro_batches):
    graph, chain = predict(each(branches(4), micro_batches)), predict(each(branches(4), micro_batches, is_chain=True))
    assert graph.seconds == pytest.approx((micro_batches + 2) * 0.06)
    assert chain.seconds == pytest.approx((micro_batches + 5) * 0.06)
    assert graph.idle_share == pytest.approx(2 / (micro_batches + 2))


def test_transfers_take_their_time():
    plan = each(chain_of([Node("a", 1, 2), Node("b", 1, 2)]), 1)
    assert predict(plan).seconds == pytest.approx(6)
    assert predict(plan, lambda first, second: 0.5).seconds == pytest.approx(7)


def test_a_wide_stage_works_on_several_at_once():
    plan = Plan(chain_of([Node("a", 2, 4), Node("b", 1, 2)]), (Stage("a", (0,), 2), Stage("b", (1,))), 4)
    spans = predict(plan).ranks
    assert [str(span.action) for span in spans[1]] == ["F1", "F3", "B1", "B3"]
    assert spans[0][0].start == spans[1][0].start == 0


def test_a_stage_without_backward_keeps_nothing_in_flight():
    plan = each(chain_of([Node("frozen", 1, 0), Node("head", 1, 2)]), 3)
    assert predict(plan).in_flight == (0, 1)


def test_text_has_a_line_for_each_rank():
    lines = predict(each(branches(2), 4)).text(60).splitlines()
    assert [len(line) for line in lines] == [60] * 4
    assert lines[0].startswith("0")
    assert set(lines[3]) == set("0123abcd.")
