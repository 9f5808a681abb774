"""What `torch.compile` has to be told, so that compiled models can be observed and frozen."""

from __future__ import annotations

import contextlib
import sys

import torch


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
