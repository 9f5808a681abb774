"""DDP exchanges the gradients of what learns now, with the hooks of before."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria.core.distributed.reducer import rebuild_reducer
from support.networks import deep_mlp
from support.ranks import all_well, in_ranks


class Strategy:
    """As Lightning's `DDPStrategy` wraps a module."""

    def __init__(self, module, **arguments):
        self.lightning_module, self._ddp_kwargs = module, arguments
        self.model = self._setup_model(module)

    def _setup_model(self, module):
        return DistributedDataParallel(module, **self._ddp_kwargs)


def join():
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    torch.manual_seed(0)
    return deep_mlp()


def rebuild():
    """Everything that one job can show, because a process takes seconds to start."""
    net = join()
    strategy = Strategy(net, broadcast_buffers=True)
    sent = []

    def hook(state, bucket):
        sent.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(state, bucket)

    strategy.model.register_comm_hook(dist.group.WORLD, hook)

    def elements(model):
        sent.clear()
        model(torch.rand(5, 4)).sum().backward()
        return sum(sent)

    told = {"all": elements(strategy.model), "wrapper": []}
    wrapped = strategy.model
    for depth in (0, 4, 0):  # modules in front that are frozen
        for place, part in enumerate(net):
            part.requires_grad_(place >= depth)
        net.zero_grad(set_to_none=True)
        rebuild_reducer(strategy, ["1.running_mean", "1.running_var", "1.num_batches_tracked"] if depth else [])
        told[f"from {depth}"] = elements(strategy.model)
        told["wrapper"].append(strategy.model is not wrapped and strategy.model.module is net)
    told["ignored"] = hasattr(net, "_ddp_params_and_buffers_to_ignore")
    told["arguments"] = strategy._ddp_kwargs
    with torch.no_grad():
        net[1].running_mean += 10 * dist.get_rank()
        net[5].running_mean += 10 * dist.get_rank()
    rebuild_reducer(strategy, ["1.running_mean"])
    net.eval()
    strategy.model(torch.rand(5, 4))
    told["frozen buffer"], told["other buffer"] = net[1].running_mean.max().item(), net[5].running_mean.max().item()
    return told


def count(net, first):
    return sum(p.numel() for place, part in enumerate(net) for p in part.parameters() if place >= first)


def test_a_rebuilt_reducer_exchanges_what_learns():
    net = deep_mlp()
    first, second = all_well(in_ranks(2, rebuild))
    assert first["all"] == first["from 0"] == count(net, 0)
    assert first["from 4"] == count(net, 4)
    assert first["wrapper"] == [True] * 3
    assert (first["ignored"], first["arguments"]) == (False, {"broadcast_buffers": True})
    # In the forward, rank 0 sends the buffers that may still change, and no others.
    assert second["frozen buffer"] > 5
    assert second["other buffer"] == first["other buffer"] < 5
    assert {key: first[key] for key in ("all", "from 0", "from 4")} == {
        key: second[key] for key in ("all", "from 0", "from 4")
    }


def test_without_ddp_nothing_is_to_be_done():
    net = nn.Linear(2, 2)
    strategy = SimpleNamespace(model=net)
    rebuild_reducer(strategy, ["weight"])
    assert strategy.model is net
    assert "_ddp_params_and_buffers_to_ignore" not in vars(net)
    rebuild_reducer(None, [])
