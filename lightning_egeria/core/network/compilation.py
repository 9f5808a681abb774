"""Making `torch.compile` models observable and freezable."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from lightning_egeria.upstream.torch import has_dynamo, is_compiled_itself, is_compiled_module


def eager() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled modules run uncompiled, because only then can they be observed.

    Without it, each observed step would compile again. It does nothing in a process that has compiled nothing.
    """
    if not has_dynamo():
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Make compiled modules compile again: before torch 2.12 they do not see a changed ``requires_grad``."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if has_dynamo() and version < (2, 12):
        torch.compiler.reset()


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has compiled the module, a submodule, or the ``forward`` of one.

    It does not detect other compiled functions.

    >>> is_compiled(nn.Sequential(nn.ReLU()))
    False
    """
    if not has_dynamo():
        return False
    return is_compiled_module(module) or any(is_compiled_itself(part) for part in module.modules())
