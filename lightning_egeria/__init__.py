"""Knowledge-guided layer freezing for PyTorch Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_egeria.caching.datamodule import FrozenPrefixCache
    from lightning_egeria.freezing.callback import KnowledgeGuidedFreezing
    from lightning_egeria.freezing.metric import SimilarityPreservingLoss
    from lightning_egeria.freezing.policy import FreezingPolicy, ScriptedPolicy
    from lightning_egeria.freezing.similarity import similarity_preserving_loss
    from lightning_egeria.freezing.slopes import SlopePolicy
    from lightning_egeria.layers import LayerChain
    from lightning_egeria.report.recorder import RunRecorder

__all__ = [
    "FreezingPolicy",
    "FrozenPrefixCache",
    "KnowledgeGuidedFreezing",
    "LayerChain",
    "RunRecorder",
    "ScriptedPolicy",
    "SimilarityPreservingLoss",
    "SlopePolicy",
    "similarity_preserving_loss",
]

_HOMES = {
    "FreezingPolicy": "freezing.policy",
    "FrozenPrefixCache": "caching.datamodule",
    "KnowledgeGuidedFreezing": "freezing.callback",
    "LayerChain": "layers",
    "RunRecorder": "report.recorder",
    "ScriptedPolicy": "freezing.policy",
    "SimilarityPreservingLoss": "freezing.metric",
    "SlopePolicy": "freezing.slopes",
    "similarity_preserving_loss": "freezing.similarity",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: the processes of the reference model need neither Lightning nor torchmetrics, which take
    # longer to import than torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
