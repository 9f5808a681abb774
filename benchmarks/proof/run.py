"""One run of a workload by one method, and the small file that is kept of it."""

import argparse
import contextlib
import json
import logging
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch.optim.swa_utils import update_bn

from benchmarks.proof.controls import (
    AutoFreeze,
    FreezeOut,
    GradualUnfreezing,
    LinearFreezing,
    ProbeThenTune,
    StaticFreezing,
)
from benchmarks.proof.curve import Curve
from benchmarks.proof.selecting import ImportanceSampling, wrapped
from benchmarks.proof.workloads import FIXED, FROZEN, PARTIAL, SHORTENED, WORKLOADS, keep, result_path
from lightning_egeria import (
    FrozenPrefixCache,
    KnowledgeGuidedFreezing,
    PrefixFreezing,
    SelectiveBackprop,
    SlopePolicy,
    StructuredPartialBackprop,
)
from lightning_egeria.cli.configuration import CONFIG_DIR, CONFIG_NAME

# An answer that comes late makes another decision, and so does another precision, which goes by what is fast: on a busy
# machine, no two runs would be the same.
SYNCHRONOUS = {"background": False, "deterministic": False, "reference_precision": "float32"}
# Prefix of a method: statistics of batch normalisation are computed from the training data before the first step.
CALIBRATED = "calibrated_"
# Of methods that come with a learning rate schedule of their own.
SCHEDULES = {
    "freezeout": ["scheduler=none"],
    "lpft": ["model.scheduler._target_=benchmarks.proof.controls.two_cycles"],
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's notes on what hardware is not used."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
            warnings.filterwarnings("ignore", message=".*lower value for log_every_n_steps")
            warnings.filterwarnings("ignore", message="cache: no more outputs")  # of fits that are to have no room
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def configured(workload: str, size: str, data: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of a workload."""
    own = [override.format(data=data, size=size) for override in WORKLOADS[workload].overrides]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(
            CONFIG_NAME,
            overrides=[f"experiment={workload}", f"size={size}", "run_dir=unused", *own, *overrides],
        )


def trainer_of(config: DictConfig, callbacks: Sequence[lightning.Callback], **changes: Any) -> lightning.Trainer:
    """The configured Trainer, which writes and prints nothing."""
    arguments = {name: value for name, value in config.trainer.items() if name != "_target_"} | changes
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(**arguments | silent, callbacks=list(callbacks))


def steps_of(config: DictConfig, datamodule: lightning.LightningDataModule) -> tuple[int, int]:
    """Steps of the whole run, and of an epoch."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    per_epoch = len(datamodule.train_dataloader())
    return config.trainer.max_epochs * per_epoch, per_epoch


def static_from(total: int) -> int:
    """After which step static freezing begins: of ``total``, 40, or a tenth if that is less.

    Statistics of batch normalisation are held from then on. With the usual momentum, they are of the data by then.
    """
    return max(1, min(40, total // 10))


def freezing_of(
    method: str, config: DictConfig, total: int, per_epoch: int, depth: int | None
) -> PrefixFreezing | None:
    """The callback that decides what freezes in this method; None in a plain run."""
    if method in ("plain", *SHORTENED, *PARTIAL, "selective", "selective_stale", "in_batch", "random", "importance"):
        return None
    if method in ("freezing", "cached", "selective_freezing", "selective_cached"):
        return hydra.utils.instantiate(config.callbacks.freezing, **SYNCHRONOUS)
    if method == "slope":
        own = {name: value for name, value in config.callbacks.freezing.items() if name[0] != "_" and name != "policy"}
        every = max(1, total // 200)
        return KnowledgeGuidedFreezing(SlopePolicy(), **own | SYNCHRONOUS | {"evaluate_every_n_steps": every})
    shared = ("layer_modules", "freeze_until", "allow_untested")
    limits = {name: config.callbacks.freezing[name] for name in shared if name in config.callbacks.freezing}
    if method == "static":
        return StaticFreezing(static_from(total), depth or 0, **limits)
    if method in FIXED:
        # Deeper than any chain: what `freeze_until` allows is frozen.
        return StaticFreezing(1, 10**6, **limits | {"freeze_until": FIXED[method]})
    if (fixed := FROZEN.fullmatch(method)) is not None:
        return StaticFreezing(max(1, total * int(fixed["percent"] or 0) // 100), int(fixed["depth"]), **limits)
    if method == "lpft":
        return ProbeThenTune(total, **limits)
    if method == "gradual":
        return GradualUnfreezing(total, per_epoch, **limits)
    if method == "linear":
        return LinearFreezing(total, per_epoch, **limits)
    if method == "freezeout":
        return FreezeOut(total, **limits)
    if method == "autofreeze":
        return AutoFreeze(total, **limits)
    raise ValueError(f"there is no method {method!r}")


def run(
    workload: str,
    size: str,
    method: str,
    seed: int,
    data: str,
    steps: int | None = None,
    depth: int | None = None,
    overrides: Sequence[str] = (),
    label: str | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Train once.

    Args:
        workload: name of the experiment.
        size: of it.
        method: one of the workload's.
        seed: of everything random.
        data: folder with all data sets.
        steps: of the shortened run.
        depth: of static freezing.
        overrides: of the configuration.
        label: stands for the method in the name of the result.
        batch_size: if it is not the workload's own.

    Returns:
        What is kept of it.
    """
    kept_as, calibrated, method = label or method, method.startswith(CALIBRATED), method.removeprefix(CALIBRATED)
    smaller = [f"data.batch_size={batch_size}"] if batch_size is not None else []
    config = configured(workload, size, data, [*SCHEDULES.get(method, []), *smaller, *overrides])
    lightning.seed_everything(seed, workers=True, verbose=False)
    datamodule = hydra.utils.instantiate(config.data)
    total, per_epoch = steps_of(config, datamodule)
    model = hydra.utils.instantiate(config.model)
    if calibrated:
        with torch.random.fork_rng():
            update_bn(datamodule.train_dataloader(), model)
    freezing = freezing_of(method, config, total, per_epoch, depth)
    partial = StructuredPartialBackprop() if method == "partial" else None
    with tempfile.TemporaryDirectory() as cache_dir, quiet():
        cache = None
        if method == "cached" or method.endswith("_cached"):
            views = WORKLOADS[workload].views
            cache = FrozenPrefixCache(datamodule, cache_dir=cache_dir, augmentation_views=views, seed=seed)
        importance = ImportanceSampling() if method == "importance" else None
        selected = wrapped(method, cache if cache is not None else datamodule, seed, WORKLOADS[workload].selects)
        selects = importance if importance is not None else SelectiveBackprop.find(selected)
        counts = (lambda: selects.selection) if selects is not None else None
        curve = Curve(freezing, cache, counts, config.data.batch_size, partial, batch_size)
        length = {"max_epochs": -1, "max_steps": steps} if steps is not None else {}
        callbacks = [one for one in (freezing, partial, importance, curve) if one is not None]
        trainer = trainer_of(config, callbacks, **length)
        began = time.perf_counter()
        trainer.fit(model, datamodule=selected)
        fit_seconds = time.perf_counter() - began
        if not curve.points or curve.points[-1]["step"] < trainer.global_step:  # it ended between two validations
            trainer.validate(model, datamodule=datamodule, verbose=False)
    savings = freezing.savings() if isinstance(freezing, KnowledgeGuidedFreezing) else None
    told = repr(kept_as) if " " in kept_as else kept_as
    command = f"python -m benchmarks.proof.compare {workload} --size {size} --methods {told} --seeds {seed}"
    return {
        "workload": workload,
        "size": size,
        "method": kept_as,
        "seed": seed,
        "overrides": list(overrides),
        "command": command,
        "about": about(),
        "steps": trainer.global_step,
        "fit_seconds": round(fit_seconds, 3),
        "curve": curve.points,
        "layer_modules": freezing.layer_modules if freezing is not None else [],
        "events": [vars(event) for event in freezing.events] if freezing is not None else [],
        "evaluations": savings.evaluations_done if savings is not None else 0,
        "evaluation_seconds": round(savings.evaluation_seconds, 3) if savings is not None else 0.0,
        "cache_bytes": cache.stats.bytes_on_disk if cache is not None else 0,
    }


def commit_of_the_code() -> str:
    """The last one that changed anything that a result depends on, with a ``+`` if more was changed since."""
    code = ["--", "lightning_egeria", "conf", "benchmarks/proof/*.py"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *arguments, *code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h", "--abbrev=7") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"


def about() -> dict[str, str]:
    """Hardware and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "commit": commit_of_the_code(),
        "device": gpu or platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def main() -> None:
    """Run and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("method")
    parser.add_argument("seed", type=int)
    parser.add_argument("--size", default="small")
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--label")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="overrides of the configuration")
    options = parser.parse_args()
    needed = {**dict.fromkeys(SHORTENED, "steps"), "static": "depth", "partial smaller": "batch_size"}
    for method, told in needed.items():
        if options.method == method and getattr(options, told) is None:
            flag = told.replace("_", "-")
            parser.error(f"{method} needs --{flag}; benchmarks.proof.compare takes it from the runs of ours")
    result = run(
        options.workload,
        options.size,
        options.method,
        options.seed,
        options.data,
        options.steps,
        options.depth,
        options.overrides,
        options.label,
        options.batch_size,
    )
    path = options.out or result_path(options.workload, options.size, result["method"], options.seed)
    keep(path, json.dumps(result, separators=(",", ":")).replace('{"step"', '\n{"step"') + "\n")


if __name__ == "__main__":
    main()
