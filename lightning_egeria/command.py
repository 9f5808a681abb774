"""`egeria`: train, run jobs, look into caches, report on runs, simulate clusters, and plan pipelines."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from shutil import get_terminal_size

import lightning_egeria
from lightning_egeria.core.programs.terminal import printable, wrapped
from lightning_egeria.errors import EgeriaError, JobError

# Module, what it does, and an example. A module is imported when its command is called: some take seconds.
COMMANDS = {
    "train": ("lightning_egeria.cli.train", "train a configured model, with Hydra's overrides", "model=resnet20"),
    "jobs": ("lightning_egeria.jobs.command", "run jobs on this machine, Ray or Slurm", "submit job.yaml"),
    "cache": ("lightning_egeria.caching.store.command", "list, check and delete cached outputs", "ls --json"),
    "report": ("lightning_egeria.report.command", "draw figures of runs, on one page", "runs/plain runs/freezing"),
    "simulate": (
        "lightning_egeria.cluster.command",
        "run a workload of jobs under cluster policies",
        "trial/workload.csv --policy pollux tiresias",
    ),
    "plan": ("lightning_egeria.methods.pipelining.command", "plan a graph pipeline", "dlrm --devices 16"),
}
_EXTRAS = {"hydra": "cli", "omegaconf": "cli", "matplotlib": "report", "scipy": "cluster"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name not in COMMANDS:
        _overview().parse_args(given)
        _overview().print_help()
        return 0
    if name == "train":  # Hydra and the processes that Lightning starts read the arguments of this process
        os.execv(sys.executable, [sys.executable, "-P", "-m", COMMANDS[name][0], *given[1:]])
    module, text, example = COMMANDS[name]
    prog = f"egeria {name}"
    try:
        room = importlib.import_module(module)
        parser = argparse.ArgumentParser(
            prog=prog,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example: {prog} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=lambda options: parser.print_help())  # of a room with commands, if none is named
        room.configure(parser)
        options = parser.parse_args(given[1:])
        status: int = options.run(options) or 0
    except EgeriaError as error:
        layer = f"{error.layer}: " if isinstance(error, JobError) else ""
        return _mistake(prog, f"{layer}{error}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        return _mistake(prog, f"needs {missing}: pip install 'lightning-egeria[{_EXTRAS[missing]}]'")
    except BrokenPipeError:  # of `egeria jobs logs 1 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _mistake(prog, f"{error.filename or 'cannot write'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    return status


def _mistake(prog: str, message: str) -> int:
    text = f"{prog}: {printable(message, keep=chr(10))}"
    print(wrapped(text, get_terminal_size().columns) if sys.stderr.isatty() else text, file=sys.stderr)
    return 2


def _overview() -> argparse.ArgumentParser:
    lines = [f"  {name:9} {text}\n            egeria {name} {example}" for name, (_, text, example) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="egeria",
        description="Train the same PyTorch Lightning model in less time, and manage its runs.",
        epilog="\n".join(["commands:", *lines, "", "`egeria COMMAND --help` explains one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning_egeria {lightning_egeria.__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
