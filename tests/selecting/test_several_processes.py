"""Selection in several processes."""

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_egeria import SelectiveBackprop
from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.errors import UnsupportedError
from support.models import Classifier, fit, images, loader
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks
from support.selecting import Checkpoints, Noting, trained


def run_on_a_rank(mode):
    strategy = DDPStrategy(timeout=EXCHANGE_TIMEOUT)
    module, trainer, data = trained(images(150), epochs=4, mode=mode, devices=2, strategy=strategy)
    state = digest(dict(module.named_parameters()))
    sizes = [len(batch) for batch in module.ids]
    return state, trainer.global_step, sizes, sorted(map(tuple, module.ids[-3:])), data.selection.dropped


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_two_ranks_train_in_step_on_their_own_samples(mode):
    (first, second) = all_well(in_ranks(2, run_on_a_rank, mode))
    assert first[:3] == second[:3]  # weights, steps and the sizes of all batches
    assert first[3] != second[3]
    assert first[2][:10] == [8] * 9 + [3]
    assert max(first[4], second[4]) <= (16 if mode == "queue" else 0) * 4


def small_net():
    """Without running statistics: a checkpoint has those of rank 0 only."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def resume_on_a_rank(folder, options):
    def run(*callbacks, **more):
        module, strategy = Noting(), DDPStrategy(timeout=EXCHANGE_TIMEOUT)
        module.net = small_net()
        return trained(images(80), *callbacks, module=module, strategy=strategy, devices=2, **options, **more)

    whole, trainer, _ = run(Checkpoints(folder))
    for step in (8, trainer.global_step - 3):
        resumed, again, _ = run(ckpt_path=folder / f"{step}")
        assert again.global_step == trainer.global_step
        assert resumed.ids == whole.ids[step:]
        assert digest(dict(resumed.named_parameters())) == digest(dict(whole.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"staleness": 1}, {"mode": "in_batch"}])
def test_two_ranks_go_on_from_a_checkpoint(tmp_path, options):
    all_well(in_ranks(2, resume_on_a_rank, tmp_path, options))


class Sharded(Classifier):
    def __init__(self):
        super().__init__(small_net())

    def configure_model(self):
        if getattr(self, "device_mesh", None) is None or isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for part in self.net[1::2]:
            fully_shard(part, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def with_fsdp_on_a_rank():
    def shards(data=2, tensors=1):
        return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensors, timeout=EXCHANGE_TIMEOUT)

    found = []
    for strategy in (DDPStrategy(timeout=EXCHANGE_TIMEOUT), shards()):
        module, data = Sharded(), SelectiveBackprop(loader(images(80)), mode="in_batch", full_every=3)
        trainer = fit(module, data=data, strategy=strategy, devices=2)
        found.append((module.losses, trainer.global_step, data.selection.epochs))
    refused = {
        "or mode='in_batch'": ({"mode": "queue"}, shards()),
        "all ranks must score at the same step": ({"mode": "in_batch", "staleness": 1}, shards()),
        "Use tensor_parallel_size=1": ({"mode": "in_batch"}, shards(1, 2)),
    }
    for words, (options, strategy) in refused.items():
        with pytest.raises(UnsupportedError, match=words):
            fit(Sharded(), data=SelectiveBackprop(loader(), **options), strategy=strategy, devices=2)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.cpu.Stream(), "record_event"), reason="this torch has no FSDP2 on the CPU")
def test_shards_are_selected_as_whole_weights():
    for ddp, fsdp in all_well(in_ranks(2, with_fsdp_on_a_rank)):
        assert ddp[1:] == fsdp[1:]
        assert ddp[0] == pytest.approx(fsdp[0], rel=1e-5)
