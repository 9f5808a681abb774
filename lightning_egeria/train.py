"""`egeria-train`: train any configured model on any configured data, with Hydra overrides."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_egeria.configuration import CONFIG_DIR, CONFIG_NAME, Sources, check, explain, near_match
from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.report.record import FILE_NAME

# Lightning is imported when training begins: each press of the tab key starts this program, and waits for it.
if TYPE_CHECKING:
    import lightning as L

_KEYWORDS_FOR_CHECKPOINTS = ("best", "last", "hpc", "registry")  # that Lightning knows
LONGEST_NAME = 60  # of a run, in pictures
_FULL_ERROR = "HYDRA_FULL_ERROR"
_TRACEBACKS = os.environ.get(_FULL_ERROR) == "1"  # the user asks for them


def train(config: DictConfig) -> dict[str, Any]:
    """Train as configured and write `savings.json` into `config.run_dir`, and the record that `egeria-report` draws.

    Returns:
        What `savings.json` holds: `savings` (`Savings.to_dict()`; None without the freezing callback, and where it did
        nothing), `cache` (the fields of `CacheStats`; None without the cache), `metrics` (the last value of each logged
        metric), `fit_time_s` (wall time of the fit, validation included).

    Raises:
        ArgumentError: `ckpt_path` does not exist.
        UnsupportedError: Lightning would start this command once more in the middle of a multirun.
    """
    import lightning as L

    # Lightning would print beside Hydra's log what also goes through it, and so into train.log.
    logging.getLogger("lightning").handlers.clear()
    from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, RunRecorder

    _check_checkpoint(config.ckpt_path)
    L.seed_everything(config.seed, workers=True, verbose=False)
    datamodule = hydra.utils.instantiate(config.data)
    if config.get("cache"):
        datamodule = hydra.utils.instantiate(config.cache, datamodule=datamodule)
    model = hydra.utils.instantiate(config.model)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.get("callbacks", {}).values()]
    callbacks.append(RunRecorder(Path(config.run_dir) / FILE_NAME, _name_of_run(config)))
    logger = hydra.utils.instantiate(config.logger) if config.get("logger") else False
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=logger)
    _check_multirun(trainer)

    if trainer.is_global_zero:
        print(f"training on {trainer.strategy.root_device}; run directory {config.run_dir}", flush=True)
    started = time.perf_counter()
    trainer.fit(model, datamodule=datamodule, ckpt_path=config.ckpt_path)
    fit_time_s = time.perf_counter() - started

    # Without a step there are no savings: a checkpoint may be of the last one, and nothing freezes in fast_dev_run.
    freezing = [c for c in callbacks if isinstance(c, KnowledgeGuidedFreezing) and c.layer_modules]
    results = {
        "savings": freezing[0].savings().to_dict() if freezing else None,
        "cache": dataclasses.asdict(datamodule.stats) if isinstance(datamodule, FrozenPrefixCache) else None,
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "fit_time_s": fit_time_s,
    }
    if trainer.is_global_zero:
        _write(Path(config.run_dir) / "savings.json", results)
    return results


def _name_of_run(config: DictConfig) -> str:
    """What was asked for, or where the run is kept."""
    asked = HydraConfig.get().job.override_dirname if HydraConfig.initialized() else ""
    return textwrap.shorten(asked, LONGEST_NAME, placeholder="...") or Path(config.run_dir).name


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
            "in a multirun, a job cannot have several processes: Lightning starts each of them with this same command, "
            "and with it the whole multirun again. Start such runs one by one, without -m"
        )


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in results["metrics"].items())
    print(f"{metrics}\nfit took {results['fit_time_s']:.1f} s; results in {path}", flush=True)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=CONFIG_NAME)
def _job(config: DictConfig) -> float | None:
    """Do one run and return the metric named by `optimized_metric`, for Hydra's sweepers."""
    # The data sets of this application lie in memory, where worker processes cost more than they bring.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning 2.6 with torch 2.15; nothing that a user could act on.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    try:
        with _hydra_raises(_TRACEBACKS):  # for processes that are started here
            check(config, Sources.of(HydraConfig.get()))
            metrics = train(config)["metrics"]
        name = config.optimized_metric
        if name is not None and name not in metrics:
            raise ArgumentError(f"optimized_metric={name}: this was not logged.{near_match(name, metrics)}")
        return None if name is None else float(metrics[name])
    except Exception as error:
        # In a multirun, it is for the sweeper to say what becomes of the other jobs.
        if HydraConfig.get().mode is RunMode.RUN:
            _end_with_message(error)
        raise


@contextlib.contextmanager
def _hydra_raises(yes: bool) -> Iterator[None]:
    """Let Hydra raise errors, or print them as it thinks best and exit with status 1."""
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
    except Exception as error:
        _end_with_message(error)
        raise


if __name__ == "__main__":
    main()
