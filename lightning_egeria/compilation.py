"""What `torch.compile` has to be told, so that compiled models can be observed and frozen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def eager() -> contextlib.AbstractContextManager[object]:
    """Inside it, compiled modules run uncompiled: only then do they pass the places where they are observed.

    Without it each observed step would be compiled anew. A process that never compiled anything is left alone.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Have compiled modules compiled anew: those of torch before 2.12 do not see a changed ``requires_grad``."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if "torch._dynamo" in sys.modules and version < (2, 12):
        torch.compiler.reset()


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, one inside it, or the ``forward`` of one was given to `torch.compile`.

    Other functions that were cannot be seen.

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


def hidden_from_compiler(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """A function that `torch.compile` runs as it is; unless ``recursive``, what it calls is compiled all the same."""
    hidden: Callable[..., Any] = torch.compiler.disable(function, recursive=recursive)
    return hidden
