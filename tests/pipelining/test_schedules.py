"""Lists of actions: golden ones, and a proof for many others that they run to their end."""

import random

import pytest

from lightning_egeria.errors import PlanError
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node, chain_of
from lightning_egeria.methods.pipelining.plan import Plan, Stage, in_running_order
from lightning_egeria.methods.pipelining.schedules import Action, check, schedule
from lightning_egeria.methods.pipelining.timeline import predict
from support.pipelining.graphs import branches, random_graph, series_parallel


def each(graph, micro_batches, **settings):
    stages = tuple(Stage(node.name, (number,)) for number, node in enumerate(graph.nodes))
    return Plan(graph, stages, micro_batches, **settings)


def printed(plan):
    return [" ".join(map(str, actions)) for actions in schedule(plan)]


def test_a_chain_is_1f1b():
    assert printed(each(chain_of([Node("a", 1, 2), Node("b", 1, 2)]), 3)) == [
        "F0 SF0:1 RB0:1 F1 SF1:1 B0 RB1:1 F2 SF2:1 RB2:1 B1 B2",
        "RF0:0 F0 RF1:0 B0 SB0:0 F1 RF2:0 B1 SB1:0 F2 B2 SB2:0",
    ]


def test_two_branches():
    assert printed(each(branches(2), 2)) == [
        "F0 SF0:1 SF0:2 RB0:1 RB0:2 F1 SF1:1 SF1:2 RB1:1 RB1:2 B0 B1",
        "RF0:0 RF1:0 F0 SF0:3 RB0:3 F1 SF1:3 RB1:3 B0 SB0:0 B1 SB1:0",
        "RF0:0 RF1:0 F0 SF0:3 RB0:3 F1 SF1:3 RB1:3 B0 SB0:0 B1 SB1:0",
        "RF0:1 RF0:2 F0 RF1:1 RF1:2 B0 SB0:1 SB0:2 F1 B1 SB1:1 SB1:2",
    ]


def test_a_frozen_tower_runs_forward_only():
    nodes = (Node("frozen", 1, 0), Node("tower", 1, 2), Node("end", 1, 2))
    lines = printed(each(ComputationGraph(nodes, ((0, 2), (1, 2))), 2))
    assert lines[0] == "F0 SF0:2 F1 SF1:2"
    assert "SB0:0" not in lines[2]
    assert "SB0:1" in lines[2]


def test_devices_of_a_wide_stage_take_turns():
    plan = Plan(chain_of([Node("a", 2, 4), Node("b", 1, 2)]), (Stage("a", (0,), 2), Stage("b", (1,))), 4)
    computed = [[str(action) for action in actions if action.stage is None] for actions in schedule(plan)]
    assert computed == [
        ["F0", "F2", "B0", "B2"],
        ["F1", "F3", "B1", "B3"],
        ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]


def random_plan(seed):
    generator = random.Random(seed)
    graph = (random_graph if seed % 2 else series_parallel)(seed)
    if generator.random() < 0.3:  # frozen from some node on backwards
        last = generator.randrange(len(graph.nodes))
        frozen = graph.before[last] | 1 << last
        nodes = tuple(
            Node(node.name, node.forward_s, 0 if frozen >> number & 1 else node.backward_s)
            for number, node in enumerate(graph.nodes)
        )
        graph = ComputationGraph(nodes, graph.edges)
    micro_batches = generator.randint(1, 9)
    while True:  # any stages that do not wait for each other in a circle
        count = generator.randint(1, len(graph.nodes))
        placement = [generator.randrange(count) for _ in graph.nodes]
        groups = [[node for node, home in enumerate(placement) if home == place] for place in range(count)]
        groups = [group for group in groups if group]
        try:
            order = in_running_order(graph, groups)
        except PlanError:
            continue
        stages = tuple(
            Stage(str(place), tuple(groups[place]), generator.randint(1, min(3, micro_batches))) for place in order
        )
        return Plan(graph, stages, micro_batches, generator.choice([1, 1, 2, 3]), generator.random() < 0.2)


def test_no_plan_waits_for_ever():
    for seed in range(200):
        check_progress(random_plan(seed))


def check_progress(plan):
    lists = schedule(plan)  # which checks it
    timeline = predict(plan)
    for rank, spans in enumerate(timeline.ranks):
        assert len(spans) == sum(action.stage is None for action in lists[rank])
        stage, _ = plan.place(rank)
        assert timeline.in_flight[rank] <= plan.in_flight_of_a_device(stage)


PLAN = each(chain_of([Node("a", 1, 2), Node("b", 1, 2)]), 2)


def edited(rank, change):
    lists = [list(actions) for actions in schedule(PLAN)]
    change(lists[rank])
    return lists


def swap(actions):
    first, second = (actions.index(Action("F", number)) for number in (0, 1))
    actions[first], actions[second] = actions[second], actions[first]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (edited(0, lambda actions: actions.remove(Action("B", 1))), "rank 0 does not run each"),
        (edited(0, swap), "rank 0 does not run each"),
        (edited(0, lambda actions: actions.remove(Action("SF", 1, 1))), "rank 0 sends micro-batches .0. and rank 1"),
        (edited(1, lambda actions: actions.insert(0, actions.pop())), "rank 1|wait forever|sends"),
        (edited(1, lambda actions: actions.insert(0, actions.pop(actions.index(Action("F", 1))))), "rank 1 does not"),
    ],
)
def test_a_wrong_list_is_refused(lists, message):
    with pytest.raises(PlanError, match=message):
        check(PLAN, lists)


def test_a_circle_of_waiting_is_found():
    """Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 0."""
    lists = edited(0, lambda actions: None)
    send = lists[0].pop(lists[0].index(Action("SF", 0, 1)))
    lists[0].insert(lists[0].index(Action("B", 0)) + 1, send)
    moved = lists[0].pop(lists[0].index(Action("SF", 1, 1)))
    lists[0].insert(lists[0].index(send) + 1, moved)
    with pytest.raises(PlanError, match=r"ranks \[0, 1\] wait forever: rank 0 at B0"):
        check(PLAN, lists)


def test_too_many_in_flight_are_refused():
    computed = [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)]
    plan = each(chain_of([Node("a", 1, 2)]), 2)
    with pytest.raises(PlanError, match="2 micro-batches in flight, expected at most 1"):
        check(plan, [computed])
