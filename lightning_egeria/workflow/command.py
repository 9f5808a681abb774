"""`egeria-jobs`: from the description of a job to its run, on this machine, Slurm or Ray."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_egeria.errors import QueueError, WorkflowError
from lightning_egeria.programs import files
from lightning_egeria.programs.arguments import whole_number
from lightning_egeria.programs.terminal import printable
from lightning_egeria.workflow.backends import NAMES, backend
from lightning_egeria.workflow.compiler import Compiled, explanation
from lightning_egeria.workflow.eviction import evict
from lightning_egeria.workflow.history import History
from lightning_egeria.workflow.home import VARIABLE, Home
from lightning_egeria.workflow.listing import table
from lightning_egeria.workflow.local_queue import queue_runs
from lightning_egeria.workflow.rules import read_description
from lightning_egeria.workflow.schema import PERIOD, quantity
from lightning_egeria.workflow.submission import cancel, refresh, resume, submit

_POLL_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.home is None:
            options.home = Home.default()
        status: int = options.run(options)
    except WorkflowError as error:
        print(f"egeria-jobs: {error.layer}: {printable(error, keep=chr(10))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `egeria-jobs logs 1 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        said = f"{error.filename or 'cannot write'}: {error.strerror or error}"
        print(f"egeria-jobs: {printable(said)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="egeria-jobs", description=__doc__)
    parser.add_argument(
        "--home",
        type=Path,
        help=f"folder of jobs and history; default: {VARIABLE}, or egeria-jobs in the user's folder for data",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    for name, run, help in (
        ("compile", _compile, "write the run directory of a job: what would run, as files"),
        ("submit", _submit, "compile a job and hand it over"),
    ):
        added = command(name, run, help)
        added.add_argument("descriptions", type=Path, nargs="+", metavar="job.yaml")
        added.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the description"
        )
    added.add_argument("-b", "--backend", choices=NAMES, default="local", help="default: local")
    added.add_argument("--after", type=int, nargs="+", default=[], metavar="ID", help="run when these jobs are done")
    listing = command("ps", _ps, "list the jobs that have not ended, and the latest that have")
    listing.add_argument("-n", type=whole_number(), default=20, help="how many that have ended; default: 20")
    listing.add_argument("--json", action="store_true", help="print one JSON object a line")
    logs = command("logs", _logs, "print the log of a job")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job ends")
    for name, run, help in (
        ("cancel", _cancel, "end jobs"),
        ("resume", _resume, "let jobs that have failed or were cancelled go on from their last checkpoint"),
    ):
        command(name, run, help).add_argument("ids", type=int, nargs="+", metavar="ID")
    logs.add_argument("id", type=int, metavar="ID")
    evicting = command("evict", _evict, "remove environments and run directories that nobody has used for some time")
    evicting.add_argument("--older-than", type=_period, default="30d", metavar="PERIOD", help="default: 30d")
    command("queue", _queue, "be the local queue until no job is left, as `submit` starts it in the background")
    serving = command("serve", _serve, "show jobs on a page, on this machine only")
    serving.add_argument("--port", type=whole_number(1, 65535), default=8642, help="default: 8642")
    serving.add_argument("--actions", action="store_true", help="let the page cancel and resume jobs")
    command("schema", _schema, "print the JSON schema of a description, for editors")
    digest = command("digest", _digest, "print the digest of a file or folder, for data sets")
    digest.add_argument("path", type=Path)
    return parser


def _compiled(options: argparse.Namespace, home: Home, history: History) -> list[tuple[Path, list[Compiled]]]:
    compiler = home.compiler(history)
    descriptions = [read_description(path, options.set) for path in options.descriptions]
    return [(description.folder, compiler.compile(description)) for description in descriptions]


def _compile(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        for _, compiled in _compiled(options, home, history):
            for one in compiled:
                print(f"{one.name}: {printable(one.path)}")
                lines = explanation(one.choices).splitlines()
                print("".join(f"  {printable(line)}\n" for line in lines), end="")
    return 0


def _submit(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        chosen = backend(options.backend, home)
        for folder, compiled in _compiled(options, home, history):
            ids = submit(home, history, chosen, compiled, folder, options.after)
            for one, id in zip(compiled, ids, strict=True):
                on = [choice.method for choice in one.choices if choice.on]
                print(f"{id}  {one.name}" + (f"  with {', '.join(on)}" if on else ""))
    return 0


def _ps(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        used = {row.backend for row in history.unfinished()} - {"local"}
        for name in sorted(used):
            try:
                refresh(home, history, {name: backend(name, home)})
            except QueueError as error:  # the others are shown all the same
                print(f"egeria-jobs: {name} jobs as they were last known: {printable(error)}", file=sys.stderr)
        rows = history.unfinished() + history.finished(options.n)
    if options.json:
        for row in rows:
            print(json.dumps(row.content()))
    else:
        print(table(rows, home), end="")
        if any(row.backend == "local" and not row.state.final for row in rows) and not queue_runs(home):
            print("no local queue runs: `egeria-jobs queue` goes on with these jobs")
    return 0


def _logs(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        history.get(options.id)
        folder = home.folder(options.id)
        with files.reading(folder.log, links=False) as log:
            while True:
                ended = history.get(options.id).state.final or folder.status().state.final
                while data := log.read(2**16):
                    sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
                if ended or not options.follow:
                    return 0
                time.sleep(_POLL_S)


def _cancel(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        for id in options.ids:
            print(cancel(home, history, backend(history.get(id).backend, home), id))
    return 0


def _resume(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        for id in options.ids:
            resume(home, history, backend(history.get(id).backend, home), id)
            print(f"job {id} goes on")
    return 0


def _period(text: str) -> int:
    if not re.fullmatch(PERIOD, text):
        raise argparse.ArgumentTypeError(f"expected a period such as 30d or 12h, got {text!r}")
    return quantity(text)


def _evict(options: argparse.Namespace) -> int:
    home = Home(options.home)
    with home.history() as history:
        evicted = evict(home, history, options.older_than)
    for kind, names in (("environments", evicted.environments), ("run directories", evicted.runs)):
        print(f"removed {len(names)} {kind}" + (f": {', '.join(names)}" if names else ""))
    return 0


def _queue(options: argparse.Namespace) -> int:
    from lightning_egeria.workflow.local_queue import main as be_the_queue

    return be_the_queue(str(options.home))


def _serve(options: argparse.Namespace) -> int:
    try:
        from lightning_egeria.workflow.serving import serve
    except ModuleNotFoundError as error:
        raise QueueError(f"serve needs {error.name}. Run: pip install 'lightning-egeria[workflow]'") from error

    serve(Home(options.home), options.port, options.actions)
    return 0


def _schema(options: argparse.Namespace) -> int:
    from lightning_egeria.workflow.editors import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _digest(options: argparse.Namespace) -> int:
    from lightning_egeria.workflow.rundirs import digest_of

    print(digest_of(options.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
