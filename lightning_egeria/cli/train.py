"""`egeria-train`: train any configured model on any configured data, with Hydra overrides."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_egeria.cli.configuration import CONFIG_DIR, CONFIG_NAME, check, explain
from lightning_egeria.cli.methods import WRAPPERS
from lightning_egeria.core.programs.files import write_whole
from lightning_egeria.errors import ArgumentError, UnsupportedError, near_match
from lightning_egeria.report.record import FILE_NAME

# Lightning is imported when training starts: each press of the tab key runs this program and waits for it.
if TYPE_CHECKING:
    import lightning as L

_KEYWORDS_FOR_CHECKPOINTS = ("best", "last", "hpc", "registry")  # that Lightning knows
_FULL_ERROR = "HYDRA_FULL_ERROR"
_SLOW = 3.0  # times as slow as float32
_TRACEBACKS = os.environ.get(_FULL_ERROR) == "1"  # the user asks for them


def train(config: DictConfig) -> dict[str, Any]:
    """Train as configured, and write `savings.json` and the record for `egeria report` into `config.run_dir`.

    Returns:
        The content of `savings.json`: `savings` (`Savings.to_dict()`; None without freezing), `cache` (the fields of
        `CacheStats`; None without the cache), `batch_sizes` (each change, by the fields of `BatchSizeChange`; None if
        they are fixed), `selection` (samples seen, scored and trained, their share and cost; None without
        `SelectiveBackprop`), `metrics` (the last value of each logged metric) and `fit_time_s` (seconds of wall time,
        validation included).

    Raises:
        ArgumentError: if `ckpt_path` does not exist.
        UnsupportedError: if a job of a multirun needs several processes.
    """
    import lightning as L

    # Hydra's log already has Lightning's lines; its own handlers would print them twice.
    logging.getLogger("lightning").handlers.clear()
    from lightning_egeria import (
        AdaptiveBatchSize,
        FrozenPrefixCache,
        KnowledgeGuidedFreezing,
        RunRecorder,
        SelectiveBackprop,
    )

    _check_checkpoint(config.ckpt_path)
    L.seed_everything(config.seed, workers=True, verbose=False)
    datamodule = data_of(config)
    model = hydra.utils.instantiate(config.model)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.get("callbacks", {}).values()]
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    overrides = [override for override in given if not override.startswith("run_dir=")]
    callbacks.append(RunRecorder(Path(config.run_dir) / FILE_NAME, overrides=overrides))
    logger = hydra.utils.instantiate(config.logger) if config.get("logger") else False
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=logger)
    _check_multirun(trainer)

    if trainer.is_global_zero:
        print(f"training on {trainer.strategy.root_device}; run directory {config.run_dir}", flush=True)
        if trainer.strategy.root_device.type == "cpu" and str(trainer.precision).startswith("bf16"):
            _tell_of_bfloat16(str(trainer.precision))
    started = time.perf_counter()
    trainer.fit(model, datamodule=datamodule, ckpt_path=config.ckpt_path)
    fit_time_s = time.perf_counter() - started

    # Without a step there are no savings: a checkpoint may be of the last one, and nothing freezes in fast_dev_run.
    freezing = [c for c in callbacks if isinstance(c, KnowledgeGuidedFreezing) and c.layer_modules]
    cache, sizes = FrozenPrefixCache.find(datamodule), AdaptiveBatchSize.find(datamodule)
    results = {
        "savings": freezing[0].savings().to_dict() if freezing else None,
        "cache": dataclasses.asdict(cache.stats) if cache is not None else None,
        "batch_sizes": [dataclasses.asdict(change) for change in sizes.changes] if sizes is not None else None,
        "selection": _counts(SelectiveBackprop.find(datamodule)),
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "fit_time_s": fit_time_s,
    }
    if trainer.is_global_zero:
        _write(Path(config.run_dir) / "savings.json", results)
    return results


def data_of(config: DictConfig) -> Any:
    """Return the configured data module, within the configured wrappers."""
    datamodule = hydra.utils.instantiate(config.data)
    for group in WRAPPERS:
        if config.get(group):
            datamodule = hydra.utils.instantiate(config[group], datamodule=datamodule)
    return datamodule


def _tell_of_bfloat16(precision: str) -> None:
    """Say so where a CPU has no fast kernels for it, as those without AVX-512."""
    import torch

    from lightning_egeria.core.profiling.clock import seconds_of_product

    ratio = seconds_of_product(torch.bfloat16) / seconds_of_product(torch.float32)
    if ratio > _SLOW:
        print(
            f"egeria-train: precision {precision} is slow here: this CPU multiplies matrices in bfloat16 {ratio:.0f} "
            "times slower than in float32. Use trainer.precision=32-true",
            file=sys.stderr,
        )


def _counts(selecting: Any) -> dict[str, float] | None:
    if selecting is None:
        return None
    found = selecting.selection
    counts = {name: getattr(found, name) for name in ("seen", "scored", "trained", "share")}
    return {**counts, "cost": found.cost()}


def _check_checkpoint(path: str | None) -> None:
    if path is None or path in _KEYWORDS_FOR_CHECKPOINTS or "://" in path or Path(path).exists():
        return
    folder = Path(path).parent
    beside = [str(file) for file in folder.iterdir()] if folder.is_dir() else []
    raise ArgumentError(f"ckpt_path={path}: there is no such file.{near_match(path, beside)}")


def _check_multirun(trainer: "L.Trainer") -> None:
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    launcher = trainer.strategy.launcher
    if (
        HydraConfig.initialized()
        and HydraConfig.get().mode is RunMode.MULTIRUN
        and isinstance(launcher, _SubprocessScriptLauncher)
        and not launcher.cluster_environment.creates_processes_externally
        and trainer.num_devices > 1
    ):
        raise UnsupportedError(
            "a multirun cannot have jobs of several processes: Lightning starts each process with this same command, "
            "which would start the whole multirun again. Start these runs one by one, without -m"
        )


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(results, indent=2) + "\n")
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in results["metrics"].items())
    print(f"{metrics}\nfit took {results['fit_time_s']:.1f} s; results in {path}", flush=True)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=CONFIG_NAME)
def _job(config: DictConfig) -> float | None:
    """Do one run and return the metric named by `optimized_metric`, for Hydra's sweepers."""
    # The data sets of this application are in memory, where worker processes only cost time.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning 2.6 with torch 2.15; the user cannot act on it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    try:
        with _hydra_raises(_TRACEBACKS):  # for processes that are started here
            config.run_dir = HydraConfig.get().runtime.output_dir  # of this job, in a multirun
            check(config)
            metrics = train(config)["metrics"]
        name = config.optimized_metric
        if name is not None and name not in metrics:
            raise ArgumentError(f"optimized_metric={name}: the run logged no such metric.{near_match(name, metrics)}")
        return None if name is None else float(metrics[name])
    except Exception as error:  # it is raised again; in a multirun, the sweeper decides whether the other jobs continue
        if HydraConfig.get().mode is RunMode.RUN:
            _end_with_message(error)
        raise


@contextlib.contextmanager
def _hydra_raises(yes: bool) -> Iterator[None]:
    """Make Hydra raise errors, or print them and exit with status 1."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1" if yes else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


def _end_with_message(error: Exception) -> None:
    message = None if _TRACEBACKS else explain(error, sys.argv[1:])
    if message is not None:
        print(f"egeria-train: {message}", file=sys.stderr)
        raise SystemExit(2) from error


def main() -> None:
    """Run the application. A mistake in the configuration ends it with one message and exit status 2."""
    try:
        with _hydra_raises(True):
            _job()
            sys.stdout.flush()
    except BrokenPipeError:  # of `egeria-train --help | head`
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()  # what is left would be written at exit
        raise SystemExit(1) from None
    except Exception as error:  # it is raised again unless it is a mistake in the configuration
        _end_with_message(error)
        raise


if __name__ == "__main__":
    main()
