"""Process groups are made once. What they send is tested by `tests/partial/test_several.py`, in real processes."""

import pytest
import torch.distributed as dist

from lightning_egeria.methods.partial import exchange
from lightning_egeria.methods.partial.exchange import RankGroups

ALL = (0, 1, 2, 3)  # for broadcasts, beside the job's own


@pytest.fixture
def made(monkeypatch):
    """The groups that a job of four ranks makes, in order."""
    found = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: found.append((tuple(ranks), timeout)) or object())
    return found


def test_each_group_is_made_once_and_in_one_order(made):
    ranks = RankGroups(timeout=None)
    ranks.ensure([(2, 3), (0, 1), (0, 1, 2, 3), (1,)])
    ranks.ensure([(1, 0), (3, 2)])
    ranks.ensure([(1, 2, 3)])
    assert [group for group, _ in made] == [ALL, (0, 1), (2, 3), (1, 2, 3)]


def test_too_many_groups_replace_the_old_ones(made, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_GROUPS", 2)
    ranks = RankGroups()
    ranks.ensure([(0, 1), (0, 2)])
    ranks.ensure([(0, 3)])
    ranks.ensure([(0, 1)])
    assert [group for group, _ in made] == [ALL, (0, 1), (0, 2), ALL, (0, 3), (0, 1)]
    ranks.close()
    ranks.close()
