"""What a step costs, by its kind: the frozen depth, and with the cache what that did (see `curve.Curve`).

Other work on the machine changes the time of a step from minute to minute, and with it the time of a whole run. So the
kinds are measured in turn, in short fits on a few batches, round after round, and each is said as a share of the step
with nothing frozen that was measured shortly before.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterable
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
from lightning_egeria.network.prefix import SETTLING_STEPS, follows_slowly

BATCHES = 10  # of an epoch
EPOCHS = 3  # that are measured
SETTLING = 3  # batches of each kind at the start that are not
FITS_BESIDE_A_FULL_ONE = 4
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


def seconds_of(
    workload: str, config: DictConfig, datamodule: lightning.LightningDataModule, fit: Fit
) -> dict[str, float]:
    """Median seconds of each kind of step in one short fit.

    Args:
        workload: that is measured.
        config: of it.
        datamodule: a few batches of its data.
        fit: what happens in it.
    """
    lightning.seed_everything(0, workers=True, verbose=False)
    model = hydra.utils.instantiate(config.model)
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
        callbacks = [callback for callback in (freezing, suffix, curve) if callback is not None]
        trainer = trainer_of(config, callbacks, max_epochs=epochs, limit_val_batches=0)
        data: lightning.LightningDataModule = cache or datamodule
        trainer.fit(model, datamodule=SelectiveBackprop(data, mode="in_batch", share=1) if fit.scores else data)
    found: dict[str, list[float]] = {}
    measured = curve.durations[(settling + fit.scores) * BATCHES :]
    for number, (kind, seconds) in enumerate(measured):
        # Before the last two epochs, the longest batches of texts do not come from entries yet.
        if not kind.endswith("hit") or number >= len(measured) - 2 * BATCHES:
            found.setdefault(kind, []).append(seconds)
    return {kind: statistics.median(all_[SETTLING:]) for kind, all_ in found.items() if len(all_) >= 2 * SETTLING}


def settles(model: torch.nn.Module) -> bool:
    """Whether it has running statistics that settle after a freeze, which other steps are measured behind."""
    return any(isinstance(module, _BatchNorm) and follows_slowly(module) for module in model.modules())


def measure(workload: str, size: str, data: str, kinds: Iterable[str], rounds: int) -> dict[str, Any]:
    """Measure all kinds, `rounds` times in turn.

    Returns:
        ``full``: median seconds of a step with nothing frozen; ``shares``: of each kind, the median over the rounds of
        its share of one that was measured shortly before, and ``spread``: the smallest and the largest.
    """
    kinds = set(kinds) | {kind.removesuffix(" score") for kind in kinds if kind.endswith("hit score")}
    fits = sorted({Fit.of(kind) for kind in kinds} - {Fit(0)})
    batch_size = configured(workload, size, data).data.batch_size
    config = configured(workload, size, data, [f"data.train_size={BATCHES * batch_size}"])

    def data_of(batch_size: int) -> lightning.LightningDataModule:
        few = [f"data.train_size={BATCHES * batch_size}", f"data.batch_size={batch_size}"]
        return hydra.utils.instantiate(configured(workload, size, data, few).data)

    datamodule = data_of(batch_size)
    full: list[float] = []
    shares: dict[str, list[float]] = {}
    scored: dict[str, list[float]] = {}  # of steps that are scored as well
    for round_ in range(rounds):
        order = fits if round_ % 2 == 0 else fits[::-1]
        for start in range(0, max(1, len(order)), FITS_BESIDE_A_FULL_ONE):
            full.append(seconds_of(workload, config, datamodule, Fit(0))["0"])
            for fit in order[start : start + FITS_BESIDE_A_FULL_ONE]:
                own = datamodule if not fit.batch_size else data_of(fit.batch_size)
                for kind, seconds in seconds_of(workload, config, own, fit).items():
                    if fit.scores and (not fit.depth or kind.endswith("hit")):
                        scored.setdefault(kind, []).append(seconds / full[-1])
                    elif kind in kinds and Fit.of(kind) == fit:
                        shares.setdefault(kind, []).append(seconds / full[-1])
        for kind, all_ in scored.items():
            alone = shares[kind][-1] if kind in shares else 1
            shares.setdefault(f"{kind} score", []).append(all_[-1] - alone)
        print(f"round {round_ + 1} of {rounds}: full step {full[-1] * 1e3:.1f} ms", flush=True)
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


def measure_missing(workload: str, size: str, data: str) -> None:
    """Measure what steps cost of the kinds that were not measured yet."""
    path, kinds = RESULTS / workload / size / "costs.json", kinds_of(workload, size)
    known = json.loads(path.read_text()) if path.is_file() else {"asked": []}
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
    options = parser.parse_args()
    measure_missing(options.workload, options.size, options.data)


if __name__ == "__main__":
    main()
