"""Private names of torch, and the texts of its errors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from lightning_egeria.upstream.needs import lacking

__all__ = ["BatchNorm", "TorchDispatchMode", "tree_leaves"]

_MODULE = ("_parameters", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl")
_FSDP_STATE = "__composable_api_state_key"
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of; None if it is no view."""
    return tensor._base


def needs_gradient(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient; one of a class of its own, which may load itself, is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter as the module stores it; None where a parametrisation keeps it elsewhere."""
    return module._parameters.get(name)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run with the forward of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a LightningModule is compiled, which Lightning notes in the module."""
    return getattr(module, "_compiler_ctx", None) is not None


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether `torch.compile` has compiled a module or its ``forward``; parts of it do not count."""
    if not has_dynamo():
        return False
    return (
        module._compiled_call_impl is not None
        or isinstance(module, torch._dynamo.OptimizedModule)
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def has_dynamo() -> bool:
    """Whether the process has compiled something, so that torch has loaded its compiler."""
    return "torch._dynamo" in sys.modules


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether an autograd node is that of activation checkpointing with ``use_reentrant=True``."""
    return node.name().startswith(f"{torch.utils.checkpoint.CheckpointFunction.__name__}Backward")


def is_cast(node: Node) -> bool:
    """Whether an autograd node casts a tensor to another dtype, as autocast does with weights."""
    return node.name() == "ToCopyBackward0" and len(node.next_functions) == 1


def is_fsdp_unit(kind: type) -> bool:
    """Whether a class is the one that FSDP2 adds to the classes of a module that it shards."""
    return kind.__name__ == "FSDPModule"


def without_fsdp_state(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without those that FSDP2 adds."""
    return {name: value for name, value in attributes.items() if not name.startswith(_FSDP_STATE)}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(RuntimeError("shapes"))
    (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def qlinear_prepack(weight: Tensor) -> Tensor:
    """Return an int8 weight as the kernel of `qlinear` takes it."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def qlinear(
    x: Tensor, scale: float, zero_point: int, packed: Tensor, scales: Tensor, zero_points: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply integers of 8 bits and return float32."""
    settings: tuple[Any, ...] = (bias, 1.0, 0, torch.float32, "none", [], "")
    result: Tensor = torch.ops.onednn.qlinear_pointwise(x, scale, zero_point, packed, scales, zero_points, *settings)
    return result


def qconv_prepack(weight: Tensor, scales: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    """Return an int8 weight as the kernel of `qconv` takes it.

    Args:
        weight: integers of 8 bits.
        scales: scale of each output channel.
        geometry: stride, padding, dilation and groups.
    """
    packed: Tensor = torch.ops.onednn.qconv_prepack(weight, scales, 1.0, 0, *geometry, None)
    return packed


def qconv(
    x: Tensor,
    scale: float,
    zero_point: int,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
) -> Tensor:
    """Convolve integers of 8 bits and return float32."""
    settings: tuple[Any, ...] = (bias, *geometry, 1.0, 0, torch.float32, "none", [], "")
    result: Tensor = torch.ops.onednn.qconv2d_pointwise(x, scale, zero_point, packed, scales, zero_points, *settings)
    return result


def missing() -> list[str]:
    """Return the private names that this torch lacks, or that mean something else in it.

    The int8 kernels are left out: a reference model without them says so, and runs in another precision.
    """
    found = lacking(nn.Module(), _MODULE) + lacking(torch.ones(1), ["_base"])
    found += lacking(torch.utils.checkpoint, ["CheckpointFunction"]) + lacking(
        torch._C, ["DisableTorchFunctionSubclass"]
    )
    if has_dynamo():
        found += lacking(torch._dynamo, ["OptimizedModule"])
    cast = torch.ones(1, requires_grad=True).to(torch.float64).grad_fn
    if cast is None or not is_cast(cast):
        found.append("the autograd node ToCopyBackward0")
    return found
