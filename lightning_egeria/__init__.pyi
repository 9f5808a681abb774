"""The public names, and where they are: type checkers read this file, and `lightning_egeria` itself."""

from lightning_egeria.caching.datamodule import FrozenPrefixCache as FrozenPrefixCache
from lightning_egeria.core.network.chain import LayerChain as LayerChain
from lightning_egeria.core.snapshots.training_state import TrainingState as TrainingState
from lightning_egeria.core.training.callback import PrefixFreezing as PrefixFreezing
from lightning_egeria.core.training.freezer import Decision as Decision
from lightning_egeria.core.training.freezer import Freezer as Freezer
from lightning_egeria.core.training.observers import Observer as Observer
from lightning_egeria.core.training.resumable import ResumableCheckpoints as ResumableCheckpoints
from lightning_egeria.freezing.callback import KnowledgeGuidedFreezing as KnowledgeGuidedFreezing
from lightning_egeria.freezing.metric import SimilarityPreservingLoss as SimilarityPreservingLoss
from lightning_egeria.freezing.policy import FreezingPolicy as FreezingPolicy
from lightning_egeria.freezing.scripted import ScriptedPolicy as ScriptedPolicy
from lightning_egeria.freezing.similarity import similarity_preserving_loss as similarity_preserving_loss
from lightning_egeria.freezing.slopes import SlopePolicy as SlopePolicy
from lightning_egeria.jobs.turns import DeviceTurns as DeviceTurns
from lightning_egeria.methods.goodput.datamodule import AdaptiveBatchSize as AdaptiveBatchSize
from lightning_egeria.methods.partial.callback import StructuredPartialBackprop as StructuredPartialBackprop
from lightning_egeria.methods.pipelining.pipeline import GraphPipeline as GraphPipeline
from lightning_egeria.methods.pipelining.strategy import GraphPipelineStrategy as GraphPipelineStrategy
from lightning_egeria.methods.selecting.datamodule import SelectiveBackprop as SelectiveBackprop
from lightning_egeria.methods.tuning.callback import BranchTuner as BranchTuner
from lightning_egeria.methods.tuning.spaces import Choice as Choice
from lightning_egeria.methods.tuning.spaces import LogUniform as LogUniform
from lightning_egeria.methods.tuning.spaces import Uniform as Uniform
from lightning_egeria.methods.tuning.tunables import CustomTunable as CustomTunable
from lightning_egeria.report.recorder import RunRecorder as RunRecorder

__version__: str
