"""Making `torch.compile` models observable and freezable."""

from __future__ import annotations

import contextlib
import sys

import torch
from torch import nn


def eager() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled modules run uncompiled, because only then can they be observed.

    Without it, each observed step would compile again. It does nothing in a process that has compiled nothing.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Make compiled modules compile again: before torch 2.12 they do not see a changed ``requires_grad``."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if "torch._dynamo" in sys.modules and version < (2, 12):
        torch.compiler.reset()


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has compiled the module, a submodule, or the ``forward`` of one.

    It does not detect other compiled functions.

    >>> is_compiled(nn.Sequential(nn.ReLU()))
    False
    """
    if "torch._dynamo" not in sys.modules:
        return False
    return getattr(module, "_compiler_ctx", None) is not None or any(  # which Lightning keeps of a LightningModule
        part._compiled_call_impl is not None
        or isinstance(part, torch._dynamo.OptimizedModule)
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in module.modules()
    )
