"""`egeria-train`: train any configured model on any configured data, with Hydra overrides."""

import dataclasses
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing
from lightning_egeria.errors import EgeriaError

_PACKAGE = Path(__file__).resolve().parent
# A wheel carries conf/ inside the package; a checkout has it beside the package.
CONFIG_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


def train(config: DictConfig) -> dict[str, Any]:
    """Train as configured and write `savings.json` into `config.run_dir`.

    Returns:
        What `savings.json` holds: `savings` (`Savings.to_dict()`; None without the freezing callback), `cache` (the
        fields of `CacheStats`; None without the cache), `metrics` (the
        last value of each logged metric), `fit_time_s` (wall time of the fit, validation included).
    """
    L.seed_everything(config.seed, workers=True, verbose=False)
    datamodule = hydra.utils.instantiate(config.data)
    if config.get("cache"):
        datamodule = hydra.utils.instantiate(config.cache, datamodule=datamodule)
    model = hydra.utils.instantiate(config.model)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.get("callbacks", {}).values()]
    logger = hydra.utils.instantiate(config.logger) if config.get("logger") else False
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=logger)

    _say(f"training on {trainer.strategy.root_device}; run directory {config.run_dir}")
    started = time.perf_counter()
    trainer.fit(model, datamodule=datamodule, ckpt_path=config.ckpt_path)
    fit_time_s = time.perf_counter() - started

    freezing = [callback for callback in callbacks if isinstance(callback, KnowledgeGuidedFreezing)]
    results = {
        "savings": freezing[0].savings().to_dict() if freezing else None,
        "cache": dataclasses.asdict(datamodule.stats) if isinstance(datamodule, FrozenPrefixCache) else None,
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "fit_time_s": fit_time_s,
    }
    _write(Path(config.run_dir) / "savings.json", results)
    return results


@rank_zero_only
def _say(message: str) -> None:
    print(message, flush=True)


@rank_zero_only
def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in results["metrics"].items())
    _say(f"{metrics}\nfit took {results['fit_time_s']:.1f} s; results in {path}")


def _intended_error(error: BaseException | None) -> EgeriaError | None:
    """Find the error meant for the user: Hydra wraps what a constructor raises in one of its own."""
    while error is not None and not isinstance(error, EgeriaError):
        error = error.__cause__
    return error


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def main(config: DictConfig) -> float | None:
    """Run the application and return the metric named by `optimized_metric`, for Hydra's sweepers."""
    # The data sets of this application lie in memory, where worker processes cost more than they bring.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning 2.6 with torch 2.15; nothing that a user could act on.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    try:
        results = train(config)
    except Exception as error:
        intended = _intended_error(error)
        if intended is None:
            raise
        print(f"egeria-train: {intended}", file=sys.stderr)
        raise SystemExit(2) from error
    metric: float | None = results["metrics"].get(config.optimized_metric)
    return metric


if __name__ == "__main__":
    main()
