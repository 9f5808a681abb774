"""What FSDP2 leaves on a module is seen, and can be taken off. `tests/distributed/` has FSDP2 itself."""

import torch
from torch import nn

from lightning_egeria.core.network.sharding import holds_shards, is_distributed, is_sharded, undivided


class FSDPModule:
    """Of the name by which FSDP2's mix-in is known."""


class Block(nn.Linear):
    pass


def divided(module):
    """As FSDP2 does it: another class, a state under a key, hooks of its own."""
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    vars(module)["__composable_api_state_key_0"] = object()

    def hook(module, arguments):
        return None

    hook.__module__ = "torch.distributed.fsdp._fully_shard"
    module.register_forward_pre_hook(hook)
    module.register_forward_hook(hook)
    return module


def test_a_plain_network_is_not_sharded():
    net = nn.Sequential(Block(2, 2), nn.ReLU())
    assert not is_sharded(net)
    assert not holds_shards(net)
    assert not is_distributed(net[0].weight)


def test_a_sharded_part_is_found():
    net = nn.Sequential(divided(Block(2, 2)), nn.ReLU())
    assert is_sharded(net[0])
    assert not is_sharded(net)
    assert not is_sharded(net[1])
    assert holds_shards(net)


def test_a_distributed_tensor_is_known_by_its_method():
    class Shard(torch.Tensor):
        def full_tensor(self):
            return self

    assert is_distributed(torch.ones(2).as_subclass(Shard))


def test_undivided_is_the_class_and_state_of_before():
    plain = Block(2, 2)
    keys = set(vars(plain))
    module = divided(plain)
    kind, state = undivided(module)
    assert kind is Block
    assert set(state) == keys
    assert len(state["_forward_pre_hooks"]) == len(state["_forward_hooks"]) == 0
    assert state["_parameters"] is module._parameters


def test_undivided_keeps_the_hooks_of_the_user():
    module = Block(2, 2)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    (number,) = module._forward_hooks
    module = divided(module)
    assert len(module._forward_hooks) == 2
    _, state = undivided(module)
    assert list(state["_forward_hooks"]) == [number]
    assert list(state["_forward_hooks_with_kwargs"]) == [number]
    assert list(state["_forward_hooks_always_called"]) == [number]
    assert len(module._forward_hooks) == 2  # the module itself is as it was


def test_undivided_of_a_plain_module_is_the_module():
    module = nn.Linear(2, 2)
    kind, state = undivided(module)
    assert kind is nn.Linear
    assert set(state) == set(vars(module))
