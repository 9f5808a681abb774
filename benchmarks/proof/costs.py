"""What a step costs, by its kind: the frozen depth, and with the cache what that did (see `curve.Curve`).

Other work on the machine changes the time of a step from minute to minute, and with it the time of a whole run. So each
kind is measured in a short fit on a few batches, in turns, step by step, with a fit in another process in which nothing
is frozen: both are slowed down alike. What threads of one do in the background is done while the other computes.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import hydra
import lightning
import torch
from omegaconf import DictConfig
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.proof.controls import SameSuffix
from benchmarks.proof.curve import Curve
from benchmarks.proof.run import about, configured, quiet, trainer_of
from benchmarks.proof.workloads import RESULTS, WORKLOADS, keep
from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy, SelectiveBackprop
from lightning_egeria.core.network.prefix import SETTLING_STEPS, follows_slowly

BATCHES = 24  # of an epoch; the first ones of a fit are not written yet
EPOCHS = 3  # that are measured
SETTLING = 3  # batches of each kind at the start that are not
RARE = 0.05  # share of a run's steps below which a kind is taken to cost what the nearest does
NO_DISK_HAS_SO_MUCH = 2**60  # bytes


class Fit(NamedTuple):
    """A short fit that has steps of some kinds.

    Attributes:
        depth: of the frozen prefix, or in front of the suffix.
        cache_does: "", there is none; "work"; or "off", it has no room to write anything.
        shallower: depth that is frozen, and cached, before it grows to that; 0: none.
        scores: whether the losses of the samples are computed before each step.
        paused: whether the prefix is not frozen, and has no gradient all the same.
        batch_size: of the batches; 0: the workload's own.
    """

    depth: int
    cache_does: str = ""
    shallower: int = 0
    scores: bool = False
    paused: bool = False
    batch_size: int = 0

    @classmethod
    def of(cls, kind: str) -> "Fit":
        """The fit that a kind of step is measured in."""
        depth, _, what = kind.partition(" ")
        if what.endswith("score"):
            return cls(int(depth), "work", scores=True) if what == "hit score" else cls(0, scores=True)
        if what.startswith("from "):
            return cls(int(depth), "work", int(what.removeprefix("from ")))
        if what.startswith("of "):
            return cls(0, batch_size=int(what.removeprefix("of ")))
        if what == "paused":
            return cls(int(depth), paused=True)
        return cls(int(depth), {"": "", "hit": "work", "miss": "work", "off": "off"}[what])


class Turns(lightning.Callback):
    """Gives the turn to another process behind each step, and waits for it to come back. Give it behind the curve.

    Args:
        other: to the other process.
        curve: of this one.
        is_first: whether this process begins.

    Attributes:
        beside: seconds of each step of the other process.
    """

    def __init__(self, other: Connection, curve: Curve, is_first: bool) -> None:
        self.beside: list[float] = []
        self._other, self._curve, self._is_first = other, curve, is_first

    def on_train_start(self, *_: Any) -> None:
        if not self._is_first:
            self._other.recv()

    def on_train_batch_end(self, *_: Any) -> None:
        self._other.send(self._curve.durations[-1][1])
        self.beside.append(self._other.recv())
        self._curve.begin_step()


def train_plainly(config: DictConfig, other: Connection) -> None:
    """Train with nothing frozen, in turns with another process, until that ends."""
    curve = Curve(None, None)
    with quiet():
        trainer = trainer_of(config, [curve, Turns(other, curve, is_first=False)], max_epochs=1000, limit_val_batches=0)
        try:
            trainer.fit(hydra.utils.instantiate(config.model), datamodule=hydra.utils.instantiate(config.data))
        except (EOFError, ConnectionError, SystemExit):
            os._exit(0)


def few_batches(workload: str, size: str, data: str, *overrides: str) -> DictConfig:
    """The configuration of a workload, with `BATCHES` batches."""
    batch_size = configured(workload, size, data, [*overrides]).data.batch_size
    return configured(workload, size, data, [*overrides, f"data.train_size={BATCHES * batch_size}"])


def shares_of(workload: str, size: str, data: str, fit: Fit, *overrides: str) -> dict[str, tuple[float, float]]:
    """Return what each kind of step costs in one short fit, and the seconds of the steps beside it with nothing frozen.

    The cost is a share of these. Both are medians.

    Args:
        workload: that is measured.
        size: of the workload.
        data: folder of its data.
        fit: what happens.
        overrides: of the configuration.
    """
    processes = multiprocessing.get_context("spawn")
    mine, others = processes.Pipe()
    plain = few_batches(workload, size, data, *overrides)
    beside = processes.Process(target=train_plainly, args=(plain, others), daemon=True)
    beside.start()
    others.close()
    try:
        own = [*overrides, f"data.batch_size={fit.batch_size}"] if fit.batch_size else overrides
        return _shares_of(workload, few_batches(workload, size, data, *own), fit, mine)
    finally:
        mine.close()
        beside.terminate()
        beside.join()


def _shares_of(workload: str, config: DictConfig, fit: Fit, other: Connection) -> dict[str, tuple[float, float]]:
    lightning.seed_everything(0, workers=True, verbose=False)
    model, datamodule = hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.data)
    views = max(1, WORKLOADS[workload].views)
    settling = math.ceil(SETTLING_STEPS / BATCHES) if settles(model) else 0
    epochs, schedule = EPOCHS + settling + fit.scores, {1: fit.shallower or fit.depth}
    if fit.shallower:
        until_cached = settling + 1 + views
        schedule[until_cached * BATCHES] = fit.depth
        epochs += until_cached
    if fit.cache_does == "work":
        epochs += views + 1
    freezing = KnowledgeGuidedFreezing(ScriptedPolicy(schedule)) if fit.depth and not fit.paused else None
    suffix = SameSuffix(fit.depth) if fit.paused else None
    with tempfile.TemporaryDirectory() as cache_dir, quiet():
        cache = None
        if fit.cache_does:
            room = {"min_free_bytes": NO_DISK_HAS_SO_MUCH} if fit.cache_does == "off" else {}
            cache = FrozenPrefixCache(
                datamodule, cache_dir=cache_dir, augmentation_views=WORKLOADS[workload].views, **room
            )
        curve = Curve(freezing, cache, partial=suffix, smaller=fit.batch_size or None)
        turns = Turns(other, curve, is_first=True)
        callbacks = [callback for callback in (freezing, suffix, curve, turns) if callback is not None]
        trainer = trainer_of(config, callbacks, max_epochs=epochs, limit_val_batches=0)
        given: lightning.LightningDataModule = cache or datamodule
        trainer.fit(model, datamodule=SelectiveBackprop(given, mode="in_batch", share=1) if fit.scores else given)
    found: dict[str, list[tuple[float, float]]] = {}
    measured = list(zip(curve.durations, turns.beside, strict=True))[(settling + fit.scores) * BATCHES :]
    for number, ((kind, seconds), beside) in enumerate(measured):
        # Before the last two epochs, the longest batches of texts do not come from entries yet.
        if not kind.endswith("hit") or number >= len(measured) - 2 * BATCHES:
            found.setdefault(kind, []).append((seconds, beside))
    shares: dict[str, tuple[float, float]] = {}
    for kind, pairs in found.items():
        if len(pairs) >= 2 * SETTLING:
            seconds, beside = (statistics.median(column) for column in zip(*pairs[SETTLING:], strict=True))
            shares[kind] = seconds / beside, beside
    return shares


def settles(model: torch.nn.Module) -> bool:
    """Whether it has running statistics that settle after a freeze, which other steps are measured behind."""
    return any(isinstance(module, _BatchNorm) and follows_slowly(module) for module in model.modules())


def measure(workload: str, size: str, data: str, kinds: Iterable[str], rounds: int) -> dict[str, Any]:
    """Measure all kinds, `rounds` times in turn.

    Returns:
        ``full``: median seconds of a step with nothing frozen; ``shares``: of each kind, the median over the rounds of
        its share of one that was measured beside it, and ``spread``: the smallest and the largest.
    """
    kinds = set(kinds) | {kind.removesuffix(" score") for kind in kinds if kind.endswith("hit score")}
    fits = sorted({Fit.of(kind) for kind in kinds} - {Fit(0)})
    full: list[float] = []
    shares: dict[str, list[float]] = {}
    scored: dict[str, list[float]] = {}  # of steps that are scored as well
    for round_ in range(rounds):
        for fit in fits if round_ % 2 == 0 else fits[::-1]:
            for kind, (share, beside) in shares_of(workload, size, data, fit).items():
                full.append(beside)
                if fit.scores and (not fit.depth or kind.endswith("hit")):
                    scored.setdefault(kind, []).append(share)
                elif kind in kinds and Fit.of(kind) == fit:
                    shares.setdefault(kind, []).append(share)
        for kind, all_ in scored.items():
            alone = shares[kind][-1] if kind in shares else 1
            shares.setdefault(f"{kind} score", []).append(all_[-1] - alone)
        print(f"round {round_ + 1} of {rounds}: full step {statistics.median(full) * 1e3:.1f} ms", flush=True)
    if rare := sorted(kinds - shares.keys() - {"0"}):
        print(f"not measured, taken to cost what the nearest kind does: {', '.join(rare)}", flush=True)
    return {
        "full": statistics.median(full),
        "shares": {kind: round(statistics.median(all_), 4) for kind, all_ in sorted(shares.items())},
        "spread": {kind: [round(min(all_), 4), round(max(all_), 4)] for kind, all_ in sorted(shares.items())},
        "rounds": rounds,
        "about": about(),
    }


def batch_size_of(workload: str, size: str, share: float) -> int:
    """Batch size of such a share of the workload's own, which is taken to be its share of the cost."""
    return max(2, round(share * configured(workload, size, data="").data.batch_size))


def kinds_of(workload: str, size: str) -> set[str]:
    """Kinds of steps in all results that there are, but for those that are rare in each of them."""
    kinds: set[str] = {"0"}
    for path in (RESULTS / workload / size).glob("*-*.json"):
        batches = json.loads(path.read_text())["curve"][-1]["batches"]
        kinds |= {kind for kind, count in batches.items() if count >= RARE * sum(batches.values())}
    return kinds


def measure_missing(workload: str, size: str, data: str, again: bool = False) -> None:
    """Measure what steps cost of the kinds that were not measured yet, or of all ``again``."""
    path, kinds = RESULTS / workload / size / "costs.json", kinds_of(workload, size)
    known = json.loads(path.read_text()) if path.is_file() and not again else {"asked": []}
    if new := kinds - set(known["asked"]):
        found = measure(workload, size, data, new, rounds=3)
        # What is known stays: a share is one of a full step that was measured shortly before.
        merged = {name: known.get(name, {}) | found[name] for name in ("shares", "spread")}
        keep(path, json.dumps(found | known | merged | {"asked": sorted(kinds | set(known["asked"]))}, indent=1) + "\n")


def main() -> None:
    """Measure what the results of a workload have in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--size", default="small")
    parser.add_argument("--data", required=True)
    parser.add_argument("--again", action="store_true", help="measure those that are known, too")
    options = parser.parse_args()
    measure_missing(options.workload, options.size, options.data, options.again)


if __name__ == "__main__":
    main()
