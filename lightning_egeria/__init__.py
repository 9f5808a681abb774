"""Knowledge-guided layer freezing for PyTorch Lightning."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_egeria.caching.datamodule import FrozenPrefixCache
    from lightning_egeria.core.network.chain import LayerChain
    from lightning_egeria.core.snapshots.training_state import TrainingState
    from lightning_egeria.core.training.callback import PrefixFreezing
    from lightning_egeria.core.training.freezer import Decision, Freezer
    from lightning_egeria.core.training.observers import Observer
    from lightning_egeria.core.training.resumable import ResumableCheckpoints
    from lightning_egeria.freezing.callback import KnowledgeGuidedFreezing
    from lightning_egeria.freezing.metric import SimilarityPreservingLoss
    from lightning_egeria.freezing.policy import FreezingPolicy
    from lightning_egeria.freezing.scripted import ScriptedPolicy
    from lightning_egeria.freezing.similarity import similarity_preserving_loss
    from lightning_egeria.freezing.slopes import SlopePolicy
    from lightning_egeria.jobs.turns import DeviceTurns
    from lightning_egeria.methods.goodput.datamodule import AdaptiveBatchSize
    from lightning_egeria.methods.partial.callback import StructuredPartialBackprop
    from lightning_egeria.methods.pipelining.pipeline import GraphPipeline
    from lightning_egeria.methods.pipelining.strategy import GraphPipelineStrategy
    from lightning_egeria.methods.selecting.datamodule import SelectiveBackprop
    from lightning_egeria.methods.tuning.callback import BranchTuner
    from lightning_egeria.methods.tuning.spaces import Choice, LogUniform, Uniform
    from lightning_egeria.methods.tuning.tunables import CustomTunable
    from lightning_egeria.report.recorder import RunRecorder

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBatchSize",
    "BranchTuner",
    "Choice",
    "CustomTunable",
    "Decision",
    "DeviceTurns",
    "Freezer",
    "FreezingPolicy",
    "FrozenPrefixCache",
    "GraphPipeline",
    "GraphPipelineStrategy",
    "KnowledgeGuidedFreezing",
    "LayerChain",
    "LogUniform",
    "Observer",
    "PrefixFreezing",
    "ResumableCheckpoints",
    "RunRecorder",
    "ScriptedPolicy",
    "SelectiveBackprop",
    "SimilarityPreservingLoss",
    "SlopePolicy",
    "StructuredPartialBackprop",
    "TrainingState",
    "Uniform",
    "similarity_preserving_loss",
]

_HOMES = {
    "AdaptiveBatchSize": "methods.goodput.datamodule",
    "Decision": "core.training.freezer",
    "DeviceTurns": "jobs.turns",
    "Freezer": "core.training.freezer",
    "Observer": "core.training.observers",
    "PrefixFreezing": "core.training.callback",
    "FreezingPolicy": "freezing.policy",
    "FrozenPrefixCache": "caching.datamodule",
    "GraphPipeline": "methods.pipelining.pipeline",
    "GraphPipelineStrategy": "methods.pipelining.strategy",
    "KnowledgeGuidedFreezing": "freezing.callback",
    "LayerChain": "core.network.chain",
    "ResumableCheckpoints": "core.training.resumable",
    "RunRecorder": "report.recorder",
    "ScriptedPolicy": "freezing.scripted",
    "SelectiveBackprop": "methods.selecting.datamodule",
    "SimilarityPreservingLoss": "freezing.metric",
    "SlopePolicy": "freezing.slopes",
    "StructuredPartialBackprop": "methods.partial.callback",
    "TrainingState": "core.snapshots.training_state",
    "BranchTuner": "methods.tuning.callback",
    "Choice": "methods.tuning.spaces",
    "LogUniform": "methods.tuning.spaces",
    "Uniform": "methods.tuning.spaces",
    "CustomTunable": "methods.tuning.tunables",
    "similarity_preserving_loss": "freezing.similarity",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the reference process needs neither Lightning nor torchmetrics, which take longer to import
    # than torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if "lightning.pytorch.cli" in sys.modules:  # LightningCLI finds only imported classes by their short names
    for _name in __all__:
        __getattr__(_name)
