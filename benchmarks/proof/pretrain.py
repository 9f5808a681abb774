"""The weights that squad_bert begins with: its encoder, trained on words hidden in the texts that it learns from."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hydra
import lightning
from hydra import compose, initialize_config_dir

from benchmarks.proof.run import quiet
from lightning_egeria.cli.configuration import CONFIG_DIR, CONFIG_NAME


def pretrain(root: Path, size: str, seed: int, out: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Train once and write the encoder's weights.

    Args:
        root: folder with the two files of SQuAD.
        size: of the experiment.
        seed: of everything random.
        out: file that is written, in the safetensors format.
        overrides: of the configuration.

    Returns:
        The last losses.
    """
    own = ["experiment=pretrain_squad", f"size={size}", "run_dir=unused", f"data.root='{root}'"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose(CONFIG_NAME, overrides=[*own, *overrides])
    lightning.seed_everything(seed, workers=True, verbose=False)
    model, datamodule = hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.data)
    with quiet():
        trainer = hydra.utils.instantiate(config.trainer, logger=False, enable_checkpointing=False)
        trainer.fit(model, datamodule=datamodule)
    model.save_encoder(out)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def main() -> None:
    """Train, write, and say where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with all data sets, of which squad/ is read")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file; without it, checkpoints/squad_bert_SIZE.safetensors in --data")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="overrides of the configuration")
    options = parser.parse_args()
    out: Path = options.out or options.data / "checkpoints" / f"squad_bert_{options.size}.safetensors"
    try:  # before minutes are spent
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        parser.error(f"{out} cannot be written, give another place with --out: {error}")
    metrics = pretrain(options.data / "squad", options.size, options.seed, out, options.overrides)
    print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()), f"\nweights in {out}")


if __name__ == "__main__":
    main()
