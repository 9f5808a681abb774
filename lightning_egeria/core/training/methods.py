"""What a method declares of itself, and which methods may train in one run.

A declaration is the constant ``METHOD`` of the folder of a method. The class of the method, and each base that others
inherit from, has it as ``egeria_method``. `lightning_egeria.cli.methods` collects the declarations of the package.

Neither this file nor a declaration imports torch or Lightning, so a job can be checked before it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_egeria.errors import UnsupportedError

_ONE_OR_DDP = ("SingleDeviceStrategy", "DDPStrategy")
_USE_DDP = "Use one device, or strategy='ddp'"
BOTH_FREEZE = "both decide which layer modules are frozen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What is known of a method before its class is imported.

    Attributes:
        name: what configurations, descriptions of jobs and reports call it.
        label: what messages call it.
        option: the file in ``conf/`` that switches it on, without its ending: ``callbacks/NAME``, or ``NAME/OPTION`` if
            it wraps the data module; empty if configurations cannot switch it on.
        around: the names of the methods whose data modules it goes around.
        strategies: class names of the strategies that it is tested with; empty if it is one itself.
        instead: what to use instead of another strategy.
        strategy_reasons: why it does not run with a strategy, by class name; others are just not tested.
        manual: why it refuses manual optimization; empty if it takes it.
        own_batches: why it refuses a training step that takes ``dataloader_iter``; empty if it takes one.
        changes_gradients: whether its steps differ in which parameters have gradients, which some settings of DDP rule
            out.
        freezes: whether it decides which layer modules are frozen, which one method can do in a run.
        apart_from: why it cannot train in one run with other methods, by their names; ``"*"`` stands for all of them.
    """

    name: str
    label: str
    option: str = ""
    around: tuple[str, ...] = ()
    strategies: tuple[str, ...] = _ONE_OR_DDP
    instead: str = _USE_DDP
    strategy_reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    manual: str = ""
    own_batches: str = ""
    changes_gradients: bool = False
    freezes: bool = False
    apart_from: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def wraps_data(self) -> bool:
        """Whether it is a data module around another."""
        return self.option.startswith(f"{self.name}/")

    def reason_against(self, other: Method) -> str | None:
        """Return why it cannot train in one run with another method; None if it can.

        >>> scaling, pruning = Method(name="scaling", label="scaling"), Method(name="pruning", label="pruning")
        >>> scaling.reason_against(pruning)
        >>> pruning = dataclasses.replace(pruning, apart_from={"scaling": "both change the width"})
        >>> scaling.reason_against(pruning)
        'both change the width'
        """
        if self.freezes and other.freezes:
            return BOTH_FREEZE
        for one, another in ((self, other), (other, self)):
            reason = one.apart_from.get(another.name, one.apart_from.get("*"))
            if reason is not None:
                return reason
        return None


# Of `PrefixFreezing`, on which all methods that freeze stand.
FREEZING = Method(
    name="freezing",
    label="freezing",
    strategies=(*_ONE_OR_DDP, "ModelParallelStrategy"),
    instead="Use strategy='ddp' or ModelParallelStrategy (FSDP2)",
    strategy_reasons={
        "FSDPStrategy": "FSDP1 flattens several layers into one parameter, which cannot freeze in part",
        "DeepSpeedStrategy": "DeepSpeed partitions the optimizer once, at the start, and keeps exchanging the "
        "gradients of frozen layers",
    },
    changes_gradients=True,
    freezes=True,
)


def check_combination(methods: Iterable[Method]) -> None:
    """Check that methods may train in one run.

    Raises:
        UnsupportedError: if two of them may not, or one is there twice.

    >>> check_combination([FREEZING, FREEZING])
    Traceback (most recent call last):
    lightning_egeria.errors.UnsupportedError: freezing is there twice, and trains once in a run. Remove one of them
    """
    for one, other in itertools.combinations(sorted(methods, key=lambda method: method.name), 2):
        if one.name == other.name:
            raise UnsupportedError(f"{one.name} is there twice, and trains once in a run. Remove one of them")
        if (reason := one.reason_against(other)) is not None:
            names = f"{one.name} and {other.name}"
            raise UnsupportedError(f"{names} cannot train in one run: {reason}. Remove one of them")


def methods_of(trainer: Any) -> Iterator[Method]:
    """Yield the methods in a Trainer."""
    for part in parts_of(trainer):
        yield type(part).egeria_method


def parts_of(trainer: Any) -> Iterator[Any]:
    """Yield what brings a method into a Trainer: its strategy, its callbacks and its nested data modules.

    A class belongs to the method that its attribute ``egeria_method`` declares.
    """
    parts = [getattr(trainer, "strategy", None), *getattr(trainer, "callbacks", ())]
    datamodule = getattr(trainer, "datamodule", None)
    while datamodule is not None:
        parts.append(datamodule)
        datamodule = vars(datamodule).get("datamodule")
    yield from (part for part in parts if isinstance(getattr(type(part), "egeria_method", None), Method))
