"""What is `optimisations: auto` worth? Four jobs of `egeria jobs`, each beside the same job without methods.

One trains from scratch with a learning rate that falls in steps, one fine-tunes pre-trained weights, one trains on two
processes, and one is tiny. Printed are what `auto` chose and why, and of both runs the
seconds of training and the final metric. Jobs run one after the other. Methods that are on also decide again what they
cost, so run it on a machine with nothing else to do.

    python benchmarks/auto_jobs.py --data FOLDER            # CIFAR-10 and Imagenette, as for `make bench`
    python benchmarks/auto_jobs.py --digits                 # small: handwritten digits, no files needed
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from lightning_egeria.jobs.backends import Queued
from lightning_egeria.jobs.compiler import explanation
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.optimisations import Choice
from lightning_egeria.jobs.rules import read_description
from lightning_egeria.jobs.submission import submit

DIGITS = ["data=digits", "data.val_fraction=0.8", "model.net.depth=8", "logger=none"]
PRETRAINED = "pretrained.safetensors"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    choices: list[Choice]
    fit_s: float
    metrics: dict[str, float]

    @property
    def on(self) -> list[str]:
        """Methods that it trained with."""
        return [choice.method for choice in self.choices if choice.on]


def on_digits(folder: Path) -> dict[str, dict]:
    """The four jobs on handwritten digits."""
    steps = [*DIGITS, "trainer=cpu", "scheduler=stepdecay", "trainer.max_epochs=12"]
    tuned = [*DIGITS, "trainer=cpu", "scheduler=cosine", "trainer.max_epochs=4", f"model.weights={folder / PRETRAINED}"]
    ranks = [*DIGITS, "trainer=ddp", "scheduler=stepdecay", "trainer.max_epochs=12"]
    tiny = [*DIGITS, "trainer=cpu", "trainer.max_epochs=1"]
    return _named("default", steps, tuned, ranks, tiny)


def on_images(data: Path) -> dict[str, dict]:
    """The four jobs on CIFAR-10 and Imagenette."""
    steps = [f"data.root={data}/cifar10", "size=small", "trainer=cpu"]
    weights = data / "checkpoints" / "resnet20_cifar10.safetensors"
    tuned = [f"data.root={data}/imagenette", "size=tight", "trainer=cpu", f"model.weights={weights}"]
    ranks = [f"data.root={data}/cifar10", "size=small", "trainer=ddp"]
    tiny = [*DIGITS, "trainer=cpu", "trainer.max_epochs=2"]
    jobs = _named("cifar10_resnet20", steps, tuned, ranks, tiny)
    jobs["tuned"]["entry"]["experiment"] = "finetune_imagenette_resnet20"
    jobs["tiny"]["entry"]["experiment"] = "default"
    return jobs


def _named(experiment: str, steps: list[str], tuned: list[str], ranks: list[str], tiny: list[str]) -> dict[str, dict]:
    jobs = {}
    for name, overrides in (("steps", steps), ("tuned", tuned), ("ranks", ranks), ("tiny", tiny)):
        jobs[name] = {
            "name": name,
            "entry": {"experiment": experiment, "overrides": overrides},
            "resources": {"devices": 2},
        }
    return jobs


def run(home: Home, folder: Path, job: dict, optimisations: str) -> Outcome:
    """Run one job to its end, alone: it takes all devices."""
    path = folder / f"{job['name']}.yaml"
    path.write_text(yaml.safe_dump(job))
    description = read_description(path, [f"optimisations={optimisations}"])
    with home.history() as history:
        (compiled,) = home.compiler(history).compile(description)
        (id,) = submit(home, history, Queued(home), [compiled], folder)
        while not history.get(id).state.final:
            time.sleep(0.2)
        if history.get(id).state is not State.DONE:
            raise SystemExit(
                f"{job['name']}: {history.get(id).status.message}\n{home.folder(id).log.read_text()[-3000:]}"
            )
    results = home.folder(id).results
    saved = json.loads((results / "savings.json").read_text())
    if job["name"] == "steps" and optimisations == "none" and not (folder / PRETRAINED).exists():
        state = torch.load(home.folder(id).checkpoints / "last.ckpt", weights_only=True)["state_dict"]
        net = {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}
        save_file(net, folder / PRETRAINED)
    return Outcome(list(compiled.choices), saved["fit_time_s"], saved["metrics"])


def compare(folder: Path, jobs: dict[str, dict]) -> dict[str, tuple[Outcome, Outcome]]:
    """Run each job without methods and with `auto`; returns both outcomes by name."""
    home, found = Home(folder / "home"), {}
    for name, job in jobs.items():
        # A home of its own for each: what the plain run has cost is not known before.
        plain = run(Home(folder / f"plain-{name}"), folder, job, "none")
        found[name] = plain, run(home, folder, job, "auto")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--data", type=Path, help="folder with cifar10, imagenette and checkpoints")
    chosen.add_argument("--digits", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jobs = on_digits(folder) if options.digits else on_images(options.data.resolve())
        found = compare(folder, jobs)
    print("| job | auto switches on | seconds without | with | ratio | metric without | with |")
    print("|---|---|---|---|---|---|---|")
    for name, (plain, auto) in found.items():
        metric = next(name for name in plain.metrics if "acc" in name)
        print(
            f"| {name} | {', '.join(auto.on) or 'nothing'} | {plain.fit_s:.0f} | {auto.fit_s:.0f} | "
            f"{auto.fit_s / plain.fit_s:.2f} | {plain.metrics[metric]:.3f} | {auto.metrics[metric]:.3f} |"
        )
    for name, (_, auto) in found.items():
        print(f"\n{name}:\n{explanation(auto.choices)}", end="")


if __name__ == "__main__":
    main()
