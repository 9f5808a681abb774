"""What ranks tell each other; two processes of gloo stand for a job."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.core.distributed.ranks import MESSAGE_BYTES, DepthBroadcast, Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.freezer import Freezer
from support.agreement import DisagreementError, compare_ranks
from support.networks import deep_mlp
from support.ranks import all_well, in_ranks


def join():
    dist.init_process_group("gloo", rank=_rank(), world_size=2)
    return Ranks()


def _rank():
    return int(os.environ["LOCAL_RANK"])


class TestDepthBroadcast:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10**6), st.integers(1, 10**9), st.text(max_size=1000))
    def test_every_message_has_the_same_size(self, depth, steps, reason):
        packed = DepthBroadcast(depth, steps, reason).packed()
        assert len(packed) == MESSAGE_BYTES
        read = DepthBroadcast.unpacked(packed)
        assert (read.depth, read.next_in_steps) == (depth, steps)
        assert reason.encode("ascii", "replace").decode().startswith(read.reason)

    @pytest.mark.parametrize("reason", ["", "calm since 4 evaluations", 'with "quotes", \\ and \n'])
    def test_a_short_reason_arrives_whole(self, reason):
        assert DepthBroadcast.unpacked(DepthBroadcast(2, 50, reason).packed()) == DepthBroadcast(2, 50, reason)

    def test_a_long_reason_is_cut(self):
        read = DepthBroadcast.unpacked(DepthBroadcast(1, 1, "x" * 2000).packed())
        assert 400 < len(read.reason) < MESSAGE_BYTES


class TestOneProcess:
    def test_it_leads_itself(self):
        ranks = Ranks()
        assert ranks.leads
        assert not ranks.several

    def test_it_agrees_with_itself(self):
        message = DepthBroadcast(1, 2, "so")
        assert Ranks().agree(message) is message

    def test_what_it_shares_stays_as_it_is(self):
        value = {"any": object()}
        assert Ranks().share(value) is value

    def test_its_buffers_stay(self):
        buffer = torch.ones(2)
        Ranks().share_buffers({"buffer": buffer})
        assert torch.equal(buffer, torch.ones(2))


def talk():
    ranks, rank = join(), _rank()
    agreed = ranks.agree(DepthBroadcast(3, 7, "of the first") if rank == 0 else None)
    overruled = ranks.agree(DepthBroadcast(rank, rank + 1, f"of rank {rank}"))
    shared = [ranks.share(value if rank == 0 else "ignored") for value in (None, [], "x" * 10_000, {"a": [1, 2.5]})]
    return ranks.leads, ranks.several, vars(agreed), vars(overruled), shared


def test_the_first_rank_is_heard_on_all():
    first, second = all_well(in_ranks(2, talk))
    assert first[:2] == (True, True)
    assert second[:2] == (False, True)
    assert first[2:] == second[2:]
    assert first[2] == {"depth": 3, "next_in_steps": 7, "reason": "of the first"}
    assert first[3] == {"depth": 0, "next_in_steps": 1, "reason": "of rank 0"}
    assert first[4] == [None, [], "x" * 10_000, {"a": [1, 2.5]}]


def buffers():
    ranks, rank = join(), _rank()
    held = {
        "odd": torch.full((3,), float(rank)).bool(),  # what follows begins where its dtype must not
        "mean": torch.full((2, 2), rank + 0.5),
        "count": torch.tensor(rank),
        "half": torch.full((3,), float(rank), dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).T + rank,
        "empty": torch.empty(0),
    }
    before = {name: buffer.data_ptr() for name, buffer in held.items()}
    ranks.share_buffers(held)
    ranks.share_buffers({})
    assert before == {name: buffer.data_ptr() for name, buffer in held.items()}
    return {name: buffer.tolist() for name, buffer in held.items()}


def test_buffers_of_the_first_rank_are_copied_in_place():
    first, second = all_well(in_ranks(2, buffers))
    assert first == second
    assert first["mean"] == [[0.5, 0.5], [0.5, 0.5]]
    assert (first["count"], first["odd"], first["half"]) == (0, [False] * 3, [0.0] * 3)
    assert first["turned"] == [[0, 3], [1, 4], [2, 5]]


def shift(value):
    with torch.no_grad():
        value += 1


CHANGES = {
    "equal": lambda net, prefix: None,
    "the weights and buffers of the prefix": lambda net, prefix: shift(net[1].running_mean),
    "the parameters": lambda net, prefix: shift(net[9].bias),
    "the depth and version": lambda net, prefix: prefix.set_depth(2),
}


def disagree():
    """What the comparison says of each change that only the second rank makes."""
    ranks, told = join(), []
    for change in CHANGES.values():
        torch.manual_seed(0)
        net = deep_mlp()
        freezer = Freezer(net, LayerChain.trace(net, lambda net=net: net(torch.rand(5, 4)).sum()), ranks)
        freezer.freeze_to(1, "both")
        compare_ranks(freezer)
        if not ranks.leads:
            change(net, freezer.prefix)
        try:
            compare_ranks(freezer)
            told.append("equal")
        except DisagreementError as error:
            told.append(str(error))
    return told


def test_the_comparison_of_ranks_finds_each_difference():
    for told in all_well(in_ranks(2, disagree)):
        assert len(told) == len(CHANGES)
        for text, expected in zip(told, CHANGES, strict=True):
            assert text.startswith("equal" if expected == "equal" else f"{expected} of rank 1 are not those of rank 0")


def test_messages_are_plain_json():
    assert json.loads(DepthBroadcast(1, 2, "three").packed()) == [1, 2, "three"]
