"""The methods: each declares once what it is called, where it is, and what it runs with.

This file imports neither torch nor Lightning, so a job can be checked before it runs. docs/extending.md has all the
places of a further method.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_egeria.errors import UnsupportedError

_ONE_OR_DDP = ("SingleDeviceStrategy", "DDPStrategy")
_USE_DDP = "Use one device, or strategy='ddp'"


@dataclasses.dataclass(frozen=True)
class Method:
    """What is known of a method before its class is imported.

    Attributes:
        label: what messages call it.
        home: path of its class. The class has the name of the method as ``egeria_method``.
        group: group of ``egeria-train`` that it is an option of; all but ``callbacks`` wrap the data module.
        option: the option that switches it on.
        strategies: class names of the strategies that it is tested with; empty if it is one itself.
        instead: what to use instead of another strategy.
        strategy_reasons: why it does not run with a strategy, by class name; others are just not tested.
        manual: why it refuses manual optimization; empty if it takes it.
        own_batches: why it refuses a training step that takes ``dataloader_iter``; empty if it takes one.
        changes_gradients: whether its steps differ in which parameters have gradients, which some settings of DDP rule
            out.
        apart_from: why it cannot train in one run with other methods, by their names; ``"*"`` stands for all of them.
    """

    label: str
    home: str
    group: str
    option: str
    strategies: tuple[str, ...] = _ONE_OR_DDP
    instead: str = _USE_DDP
    strategy_reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    manual: str = ""
    own_batches: str = ""
    changes_gradients: bool = False
    apart_from: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def wraps_data(self) -> bool:
        """Whether it is a data module around another."""
        return self.group not in ("callbacks", "")

    @property
    def setting(self) -> str:
        """What configurations and descriptions of jobs call it; empty if they cannot switch it on."""
        return self.group if self.wraps_data else self.option


# Those that wrap the data module stand in the order from the innermost to the outermost.
METHODS: dict[str, Method] = {
    "freezing": Method(
        label="freezing",
        home="lightning_egeria.freezing.callback.KnowledgeGuidedFreezing",
        group="callbacks",
        option="freezing",
        strategies=(*_ONE_OR_DDP, "ModelParallelStrategy"),
        instead="Use strategy='ddp' or ModelParallelStrategy (FSDP2)",
        strategy_reasons={
            "FSDPStrategy": "FSDP1 flattens several layers into one parameter, which cannot freeze in part",
            "DeepSpeedStrategy": "DeepSpeed partitions the optimizer once, at the start, and keeps exchanging the "
            "gradients of frozen layers",
        },
        changes_gradients=True,
    ),
    "goodput": Method(
        label="AdaptiveBatchSize",
        home="lightning_egeria.methods.goodput.datamodule.AdaptiveBatchSize",
        group="goodput",
        option="adaptive",
        manual="it sets the learning rate of each step, and with manual optimization nothing tells which steps belong "
        "together",
        apart_from={
            "selecting": "selected samples bias the gradient noise scale",
            "partial": "the gradient noise scale needs the gradients of all ranks for every layer",
            "tuning": "both set the batch size and the learning rate",
        },
    ),
    "caching": Method(
        label="the cache",
        home="lightning_egeria.caching.datamodule.FrozenPrefixCache",
        group="cache",
        option="disk",
    ),
    "selecting": Method(
        label="selective backprop",
        home="lightning_egeria.methods.selecting.datamodule.SelectiveBackprop",
        group="selecting",
        option="queue",
        strategies=(*_ONE_OR_DDP, "ModelParallelStrategy"),
        own_batches="it selects among the samples of a batch",
        apart_from={"tuning": "trials of settings train on every sample so far"},
    ),
    "partial": Method(
        label="partial backprop",
        home="lightning_egeria.methods.partial.callback.StructuredPartialBackprop",
        group="callbacks",
        option="partial",
        strategy_reasons={
            "ModelParallelStrategy": "FSDP2 gathers weights and exchanges gradients in the backward of each layer, so "
            "a rank with a shorter suffix would leave the others waiting",
            "FSDPStrategy": "FSDP1 flattens several layers into one parameter, which has a gradient as a whole",
            "DeepSpeedStrategy": "DeepSpeed exchanges gradients in buckets that it fixes at the start",
        },
        manual="it needs one backward for each batch, and manual optimization may have others",
        changes_gradients=True,
    ),
    "tuning": Method(
        label="branch tuning",
        home="lightning_egeria.methods.tuning.callback.BranchTuner",
        group="callbacks",
        option="tuning",
        strategy_reasons={"ModelParallelStrategy": "FSDP2 divides the state of training, which trials return to"},
        own_batches="it reads batches ahead",
    ),
    "pipelining": Method(
        label="a graph pipeline",
        home="lightning_egeria.methods.pipelining.strategy.GraphPipelineStrategy",
        group="",
        option="",
        strategies=(),
        manual="for a training loop of your own there is GraphPipeline",
        own_batches="it splits batches",
        apart_from={"*": "a graph pipeline runs without other methods"},
    ),
}

# The names of the methods, by what configurations and descriptions of jobs call them.
BY_SETTING = {method.setting: name for name, method in METHODS.items() if method.setting}


def reason_against(one: str, other: str) -> str | None:
    """Return why two methods cannot train in one run; None if they can.

    Args:
        one: name of a method.
        other: of another one.

    >>> reason_against("freezing", "caching")
    >>> reason_against("goodput", "tuning")
    'both set the batch size and the learning rate'
    """
    for first, second in ((one, other), (other, one)):
        apart = METHODS[first].apart_from
        if first != second and (reason := apart.get(second, apart.get("*"))) is not None:
            return reason
    return None


def check_combination(names: Iterable[str]) -> None:
    """Check that methods may train in one run.

    Args:
        names: of the methods.

    Raises:
        UnsupportedError: if two of them may not, or one is there twice.

    >>> check_combination(["freezing", "caching", "freezing"])
    Traceback (most recent call last):
    lightning_egeria.errors.UnsupportedError: freezing is there twice, and trains once in a run. Remove one of them
    """
    counts = Counter(names)
    for name, count in counts.items():
        if count > 1:
            raise UnsupportedError(f"{name} is there twice, and trains once in a run. Remove one of them")
    for one, other in itertools.combinations(sorted(counts, key=list(METHODS).index), 2):
        reason = reason_against(one, other)
        if reason is not None:
            raise UnsupportedError(f"{one} and {other} cannot train in one run: {reason}. Remove one of them")


def methods_of(trainer: Any) -> Iterator[str]:
    """Yield the names of the methods in a Trainer."""
    for part in parts_of(trainer):
        yield type(part).egeria_method


def parts_of(trainer: Any) -> Iterator[Any]:
    """Yield what brings a method into a Trainer: its strategy, its callbacks and its nested data modules.

    A class belongs to a method if its attribute ``egeria_method`` names one of `METHODS`.
    """
    parts = [getattr(trainer, "strategy", None), *getattr(trainer, "callbacks", ())]
    datamodule = getattr(trainer, "datamodule", None)
    while datamodule is not None:
        parts.append(datamodule)
        datamodule = vars(datamodule).get("datamodule")
    yield from (part for part in parts if getattr(type(part), "egeria_method", None) in METHODS)
