"""Recognising what FSDP2 has sharded, and the module as it was before."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_egeria.upstream.torch import is_fsdp_unit, without_fsdp_state


def is_sharded(module: nn.Module) -> bool:
    """Whether the module is a unit of FSDP2, which gathers its weights for each call."""
    return any(map(is_fsdp_unit, type(module).__mro__))


def holds_shards(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded weights of the module or of a submodule."""
    return any(is_sharded(part) for part in module.modules())


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is one rank's shard of a larger one (a ``DTensor``)."""
    return hasattr(tensor, "full_tensor")


def undivided(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class and attributes that a module had before FSDP2.

    >>> undivided(nn.ReLU())[0].__name__
    'ReLU'
    """
    state = without_fsdp_state(vars(module))
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = state[name]
        own = {number: hook for number, hook in hooks.items() if not _is_of_fsdp(hook)}
        state[name] = type(hooks)(own)
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            if extra in state:
                state[extra] = type(state[extra])({n: value for n, value in state[extra].items() if n in own})
    bases = type(module).__mro__
    place = next((number for number, base in enumerate(bases) if is_fsdp_unit(base)), -1)
    return bases[place + 1], state


def _is_of_fsdp(hook: Any) -> bool:
    parts = (hook, type(getattr(hook, "__self__", None)))
    return any(str(getattr(part, "__module__", "")).startswith("torch.distributed.") for part in parts)
