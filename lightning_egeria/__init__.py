"""Knowledge-guided layer freezing for PyTorch Lightning."""

from lightning_egeria.freezing.callback import KnowledgeGuidedFreezing
from lightning_egeria.freezing.policy import FreezingPolicy, ScriptedPolicy
from lightning_egeria.freezing.similarity import SimilarityPreservingLoss, similarity_preserving_loss
from lightning_egeria.layers import LayerChain

__all__ = [
    "FreezingPolicy",
    "KnowledgeGuidedFreezing",
    "LayerChain",
    "ScriptedPolicy",
    "SimilarityPreservingLoss",
    "similarity_preserving_loss",
]
