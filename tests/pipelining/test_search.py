"""The stages that the search finds are those that trying all finds."""

import pytest

from lightning_egeria.methods.pipelining.decomposition import Leaf, Parallel, Series
from lightning_egeria.methods.pipelining.search import Search, Sizes, parts_of


def stages(tree, seconds, devices, bound, memory=None, kept=0, **limits):
    sizes = [Sizes(one, kept, 1) for one in seconds]
    settings = {"micro_batches": 8, "group": 1, "max_width": None, **limits}
    return Search(devices, memory_bytes=memory, bound_s=bound, **settings).stages(parts_of(tree, sizes))


def test_branches_alike_share_one_solution():
    tree = Parallel(tuple(Series((Leaf(2 * branch), Leaf(2 * branch + 1))) for branch in range(3)))
    parts = parts_of(tree, [Sizes(1, 0, 0)] * 6)
    assert len({part.shape for part in parts.parts}) == 1
    assert sorted(stages(tree, [1] * 6, devices=3, bound=2)) == [((0, 1), 1), ((2, 3), 1), ((4, 5), 1)]


def test_several_branches_become_one_stage_where_devices_are_few():
    tree = Parallel((Leaf(0), Leaf(1), Leaf(2)))
    assert sorted(stages(tree, [3, 1, 2], devices=2, bound=3)) == [((0,), 1), ((2, 1), 1)]
    assert stages(tree, [3, 1, 2], devices=2, bound=2.9) is None


def test_a_stage_is_wide_where_a_node_is_slow():
    tree = Series((Leaf(0), Leaf(1)))
    assert stages(tree, [4, 1], devices=5, bound=1) == [((0,), 4), ((1,), 1)]
    assert stages(tree, [4, 1], devices=5, bound=1, max_width=3) is None


def test_memory_splits_a_stage():
    tree = Series((Leaf(0), Leaf(1)))
    assert stages(tree, [1, 1], devices=2, bound=9, memory=22, kept=10) == [((0, 1), 1)]
    assert stages(tree, [1, 1], devices=2, bound=9, memory=21, kept=10) == [((0,), 1), ((1,), 1)]
    assert stages(tree, [1, 1], devices=2, bound=9, memory=20, kept=10) is None


@pytest.mark.parametrize("branches", [8, 12])
def test_many_branches_are_grouped_in_order_of_cost(branches):
    tree = Parallel(tuple(map(Leaf, range(branches))))
    found = stages(tree, [1] * branches, devices=4, bound=branches / 4)
    assert sorted(len(nodes) for nodes, _ in found) == [branches // 4] * 4
