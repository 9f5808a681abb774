"""Each rank of a job has a cache; the ranks of a node share one store."""

import functools
import logging
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from lightning_egeria.caching import policy
from support import untimed
from support.agreement import ChecksRanks
from support.caching.harness import Run
from support.caching.parts import Classifier, ConvNet, Net, images, loader
from support.ranks import all_well, in_ranks


def train(folder, cached, schedule=None, net=ConvNet, data=None, strategy=None, **options):
    """One rank: returns the outputs of its steps, its weights, and what the cache did."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    run = Run(cached, Path(folder) / f"{cached} {os.environ['LOCAL_RANK']}")
    run.cache_dir = Path(folder) / "cache"
    module = Classifier(net())
    for name, value in untimed.FREE.items():  # in this process only
        setattr(policy, name, value)
    run.fit(
        module,
        loader(images(48)) if data is None else data(),
        ChecksRanks(),
        schedule={4: 2} if schedule is None else schedule,
        max_epochs=8,
        devices=2,
        strategy=strategy() if strategy is not None else DDPStrategy(timeout=timedelta(seconds=60)),
        **options,
    )
    losses = [value for name, value in run.recorded if name.startswith("outputs")]
    weights = dict(run.recorded)["weights"] if strategy is None else None
    return losses, weights, vars(run.caches[0].stats) if cached else None


def with_workers():
    return loader(images(48), num_workers=1, persistent_workers=True)


def with_sampler():
    data = images(48)
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, int(os.environ["LOCAL_RANK"]), seed=3))


KINDS = {
    "": {"schedule": {4: 2, 12: 1, 18: 0, 22: 2}},
    "workers": {"data": with_workers},
    "sampler of the user": {"data": with_sampler},
    "bf16 and accumulation": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
}


@pytest.mark.parametrize(
    "arguments", [pytest.param(a, id=name, marks=[pytest.mark.slow] * bool(name)) for name, a in KINDS.items()]
)
def test_cached_ranks_train_like_others(tmp_path, arguments):
    plain, cached = (
        all_well(in_ranks(2, functools.partial(train, tmp_path, cached, **arguments))) for cached in (False, True)
    )
    for (losses, weights, _), (cached_losses, cached_weights, stats) in zip(plain, cached, strict=True):
        assert stats["off"] is None
        assert stats["hits"] > 20
        assert cached_losses == losses
        assert cached_weights == weights


@pytest.mark.slow
def test_ranks_share_one_store(tmp_path):
    first, second = (stats for _, _, stats in all_well(in_ranks(2, functools.partial(train, tmp_path, True))))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    # A shuffled epoch gives a rank samples that the other one has recorded.
    assert first["hits"] + second["hits"] > 48


class Talking(Net):
    """Its back sums over the ranks."""

    def forward(self, x):
        x = super().forward(x)
        everyone = x.detach().mean(0)
        dist.all_reduce(everyone)
        return x - everyone


class TalkingFront(Net):
    """Its front sums over the ranks."""

    def __init__(self):
        super().__init__()
        self.a.append(SumOfRanks())


class SumOfRanks(nn.Module):
    def forward(self, x):
        everyone = x.detach().mean(0)
        dist.all_reduce(everyone)
        return x - everyone


def vectors():
    return loader(torch.utils.data.TensorDataset(torch.randn(48, 8), torch.arange(48) % 3))


@pytest.mark.slow
def test_back_may_exchange_tensors(tmp_path):
    plain, cached = (
        all_well(in_ranks(2, functools.partial(train, tmp_path, cached, net=Talking, data=vectors)))
        for cached in (False, True)
    )
    for (losses, weights, _), (cached_losses, cached_weights, stats) in zip(plain, cached, strict=True):
        assert stats["hits"] > 20
        assert (cached_losses, cached_weights) == (losses, weights)


@pytest.mark.slow
def test_front_that_exchanges_tensors_is_not_cached(tmp_path):
    plain, cached = (
        all_well(in_ranks(2, functools.partial(train, tmp_path, cached, net=TalkingFront, data=vectors)))
        for cached in (False, True)
    )
    for (losses, weights, _), (cached_losses, cached_weights, stats) in zip(plain, cached, strict=True):
        assert stats["off"] is not None
        assert stats["hits"] == 0
        assert (cached_losses, cached_weights) == (losses, weights)


class Sharded(Classifier):
    def configure_model(self):
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net.a, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def train_sharded(folder):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run = Run(True, Path(folder) / os.environ["LOCAL_RANK"])
    trainer = run.trainer(
        schedule={3: 1},
        max_epochs=2,
        devices=2,
        strategy=ModelParallelStrategy(2, 1, timeout=timedelta(seconds=60)),
    )
    trainer.fit(Sharded(), datamodule=run.data(loader()))
    return run.caches[0].stats.off


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.cpu.Stream(), "record_event"), reason="this torch has no FSDP2 on the CPU")
def test_sharded_model_turns_the_cache_off(tmp_path):
    for off in all_well(in_ranks(2, functools.partial(train_sharded, tmp_path))):
        assert off.startswith("FSDP2 gathers the weights of a layer on all ranks together")
