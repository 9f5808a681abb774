"""What is counted, against sums by hand."""

import pytest

from lightning_egeria.methods.partial.savings import SuffixCounts


def test_each_rank_is_counted():
    counts = SuffixCounts(2)
    counts.add((0, 2), 0, [10.0, 4.0], [10.0, 10.0])
    counts.add((1, 0), 0, [8.0, 10.0], [10.0, 10.0])
    savings = counts.savings([1.0, 0.5, 0.25], {"stem": 2}, {0: 100})
    assert savings.steps == 2
    assert [rank.backward_share for rank in savings.ranks] == [0.75, 0.625]
    assert [rank.received_bytes for rank in savings.ranks] == [18.0, 14.0]
    assert [rank.whole_bytes for rank in savings.ranks] == [20.0, 20.0]
    assert "rank 0: 75 % of the backward, 0.0 MB of gradients received" in savings.describe()[0]


def test_a_share_is_one_of_the_backward_behind_what_is_frozen():
    counts = SuffixCounts(1)
    counts.add((1,), 1, [0.0], [0.0])
    counts.add((2,), 1, [0.0], [0.0])
    savings = counts.savings([1.0, 0.5, 0.25], {}, {})
    assert savings.ranks[0].backward_share == pytest.approx(0.75)
    assert savings.describe()[0] == "rank 0: 75 % of the backward"


def test_what_was_not_measured_is_said():
    counts = SuffixCounts(1)
    counts.add((0,), 0, [0.0], [0.0])
    lines = counts.savings(None, {"stem": 1}, {}).describe()
    assert lines == [
        "rank 0: an unmeasured share of the backward",
        "gradients of the layer modules in 1 steps of 1 ranks: 'stem' 1",
    ]
