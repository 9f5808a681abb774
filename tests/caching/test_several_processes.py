"""Each rank of a DDP job has a cache of its own; the store is one."""

import functools
import logging
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from agreement import ChecksRanks
from cached_runs import Classifier, Net, fit, images, loader_of
from collectives import Collectives
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from ranks import all_well, in_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SCHEDULE = {4: 2, 18: 3, 30: 0, 34: 1}


def run(cache_dir, options=None, net=None, strategy=None, own_sampler=False, schedule=None, **arguments):
    """Losses and parameters, and what the cache did; without one if ``cache_dir`` is None."""
    if net is SyncedNet:
        # It refuses SyncBatchNorm on the CPU, for the sake of which `Synced` has another forward.
        DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None
    torch.manual_seed(0)
    module = Classifier(net() if net is not None else None)
    dataset = images(count=48)
    if own_sampler:
        rank = int(os.environ["LOCAL_RANK"])
        data = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, num_replicas=2, rank=rank, seed=3))
    else:
        data = loader_of(dataset, batch_size=4, **(options or {}))
    trainer_options = {
        "devices": 2,
        "strategy": strategy() if strategy is not None else DDPStrategy(timeout=timedelta(seconds=60)),
        **arguments,
    }
    wrapped = fit(
        module,
        data,
        schedule or SCHEDULE,
        cache=None if cache_dir is None else {"cache_dir": cache_dir},
        epochs=8,
        trainer_options=trainer_options,
        evaluate_every_n_steps=1,
        callbacks=[ChecksRanks()],
    )
    weights = [p.detach().numpy() for p in module.parameters()] if strategy is None else []
    told = vars(wrapped.stats) if wrapped is not None else None
    return [float(loss) for loss in module.losses], weights, told


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"options": {"num_workers": 1, "persistent_workers": True}},
        {"own_sampler": True},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "schedule": {2: 2, 9: 3, 15: 0, 17: 1}},
    ],
    ids=["", "workers", "own_sampler", "bf16"],
)
def test_cached_is_uncached(arguments, tmp_path):
    plain = all_well(in_ranks(2, functools.partial(run, None, **arguments)))
    cached = all_well(in_ranks(2, functools.partial(run, tmp_path, **arguments)))
    for (losses, weights, _), (cached_losses, cached_weights, stats) in zip(plain, cached, strict=True):
        assert stats["off"] is None
        assert stats["hits"] > 20
        assert cached_losses == losses
        assert all((a == b).all() for a, b in zip(weights, cached_weights, strict=True))


def test_the_ranks_of_a_node_share_one_store(tmp_path):
    first, second = all_well(in_ranks(2, functools.partial(run, tmp_path, schedule={4: 2})))
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 1
    # A shuffled epoch gives a rank samples that the other one has recorded.
    assert first[2]["hits"] + second[2]["hits"] > 48


def run_counted(net):
    """The collectives of each step before its backward pass, and their bytes."""
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None  # as in `run`
    collectives = Collectives(backward=False)
    fit(
        Classifier(net()),
        loader_of(images(count=48), batch_size=4),
        {3: 2},
        epochs=2,
        callbacks=[collectives],
        evaluate_every_n_steps=1,
        trainer_options={"devices": 2, "strategy": DDPStrategy(timeout=timedelta(seconds=60))},
    )
    return collectives.counts, collectives.bytes


def test_statistics_of_frozen_layers_are_not_sent_any_longer():
    (_, sent), _ = all_well(in_ranks(2, run_counted, Net))
    broadcast = [step["c10d::broadcast_"] for step in sent]  # buffers, and the word of the first rank
    net = Net()
    everything = sum(buffer.nbytes for buffer in net.buffers())
    active = sum(buffer.nbytes for part in (net.b, net.c) for buffer in part.buffers())
    # The first two steps also carry the layer chain and DDP's order of buckets, and so does the second after a freeze.
    assert broadcast[2] == everything
    assert set(broadcast[5:]) == {active}


class Synced(nn.SyncBatchNorm):
    """Takes its statistics over all ranks, as the original does on a GPU."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        mean = x.mean((0, 2, 3))
        dist.all_reduce(mean)
        return nn.functional.batch_norm(x - mean.detach()[:, None, None], None, None, self.weight, self.bias, True)


class SyncedNet(Net):
    def __init__(self):
        super().__init__()
        for part in (self.stem, self.a, self.b, self.c):
            part[1] = Synced(8)


class Talking(Net):
    """Its back asks the other ranks for something."""

    def forward(self, x):
        x = super().forward(x)
        everyone = x.detach().mean(0)
        dist.all_reduce(everyone)
        return x - everyone


def test_normalisation_over_all_ranks(tmp_path):
    plain = all_well(in_ranks(2, functools.partial(run, None, net=SyncedNet)))
    cached = all_well(in_ranks(2, functools.partial(run, tmp_path, net=SyncedNet)))
    for (losses, weights, _), (cached_losses, cached_weights, stats) in zip(plain, cached, strict=True):
        assert stats["off"] is None
        assert stats["hits"] > 20
        assert cached_losses == losses
        assert all((a == b).all() for a, b in zip(weights, cached_weights, strict=True))


def test_frozen_normalisation_asks_no_other_rank():
    (counts, _), _ = all_well(in_ranks(2, run_counted, SyncedNet))
    sums = [step["c10d::allreduce_"] for step in counts]
    assert set(sums[:3]) == {4}
    assert set(sums[4:]) == {2}


def test_a_network_that_talks_to_other_ranks_is_not_cached(tmp_path):
    for losses, _, stats in all_well(in_ranks(2, functools.partial(run, tmp_path, net=Talking))):
        assert "exchanges tensors with other processes" in stats["off"]
        assert len(losses) == 48


class Sharded(Classifier):
    def configure_model(self):
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net.stem, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def run_sharded(cache_dir):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    wrapped = fit(
        Sharded(),
        loader_of(images(count=48), batch_size=4),
        {3: 2},
        cache={"cache_dir": cache_dir},
        epochs=2,
        evaluate_every_n_steps=1,
        trainer_options={
            "devices": 2,
            "strategy": ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1, timeout=timedelta(seconds=60)
            ),
        },
    )
    return wrapped.stats.off


@pytest.mark.skipif(not hasattr(torch.cpu.Stream(), "record_event"), reason="this torch has no FSDP2 on the CPU")
def test_under_fsdp_the_cache_is_off(tmp_path):
    for off in all_well(in_ranks(2, functools.partial(run_sharded, tmp_path))):
        assert off.startswith("FSDP2 gathers the weights of a layer on all ranks together")
