"""Peak memory of a run with freezing and the cache, beside the plain run: each in a process of its own.

python -m benchmarks.memory --data FOLDER [--workload finetune_imagenette_resnet20] [--host-bytes 100000000]
"""

import argparse
import resource
import subprocess
import sys
import tempfile

import hydra
import lightning

from benchmarks.proof.run import configured, freezing_of, quiet, steps_of, trainer_of
from lightning_egeria import FrozenPrefixCache

WAYS = ("plain", "freezing", "cached")
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def train(options: argparse.Namespace) -> None:
    """Train in one way, and print the most bytes that the process had in memory."""
    config = configured(options.workload, options.size, options.data)
    lightning.seed_everything(0, workers=True, verbose=False)
    datamodule = hydra.utils.instantiate(config.data)
    total, per_epoch = steps_of(config, datamodule)
    freezing = freezing_of(options.way, config, total, per_epoch, None)
    with tempfile.TemporaryDirectory() as folder, quiet():
        if options.way == "cached":
            datamodule = FrozenPrefixCache(datamodule, cache_dir=folder, host_bytes=options.host_bytes)
        trainer = trainer_of(config, [freezing] if freezing is not None else [])
        trainer.fit(hydra.utils.instantiate(config.model), datamodule=datamodule)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT)


def main() -> None:
    """Train in each way and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the data sets of the proof")
    parser.add_argument("--workload", default="finetune_imagenette_resnet20")
    parser.add_argument("--size", default="tight")
    parser.add_argument("--host-bytes", type=int, default=10**8)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        train(options)
        return
    peaks = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.memory", *sys.argv[1:], "--way", way]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks[way] = int(found.stdout.split()[-1])
        print(f"{way}: {peaks[way] / 1e6:.0f} MB, {peaks[way] / peaks['plain']:.2f} of plain", flush=True)
    allowed = 1.1 * (peaks["plain"] + options.host_bytes)
    print(f"cached: {peaks['cached'] / allowed:.2f} of 1.1 times plain + host_bytes")


if __name__ == "__main__":
    main()
