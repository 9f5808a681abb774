"""`egeria jobs`: from the description of a job to its run, on this machine, Ray or Slurm."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.arguments import period, whole_number
from lightning_egeria.core.programs.terminal import printable, takes_json, tell, width_of_terminal, wrapped
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.backends import NAMES, backend
from lightning_egeria.jobs.compiler import Compiled, explanation
from lightning_egeria.jobs.eviction import evict
from lightning_egeria.jobs.history import History, Row
from lightning_egeria.jobs.home import VARIABLE, Home
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.listing import as_text, details, table
from lightning_egeria.jobs.queue import SERVED, queue_runs
from lightning_egeria.jobs.rules import read_description
from lightning_egeria.jobs.scheduling import LIVE
from lightning_egeria.jobs.submission import Backend, cancel, refresh, remove, resume, submit

_POLL_S = 0.2
_BACKENDS_S = 2.0  # between two looks at Slurm
_MOST_LINES = 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    _takes_home(parser, None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[..., int], text: str, example: str, ids: str = "") -> Any:
        about: dict[str, Any] = {
            "description": f"{text[:1].upper()}{text[1:]}.",
            "epilog": f"example: egeria jobs {name} {example}".rstrip(),
        }
        if example:  # the others are for programs and editors: the list leaves them out
            about["help"] = text
        added = commands.add_parser(name, **about)
        _takes_home(added, argparse.SUPPRESS)  # or its default would replace what stands in front of the command
        added.set_defaults(run=lambda options: _with_home(run, options))
        if ids:
            added.add_argument("id" if ids == "1" else "ids", type=_id, nargs=None if ids == "1" else "+", metavar="ID")
        return added

    handing = command(
        "submit", _submit, "check jobs, and hand them to the queue or to Slurm", "job.yaml --set resources.devices=2"
    )
    handing.add_argument("descriptions", type=Path, nargs="+", metavar="job.yaml", help="description of a job")
    handing.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the description")
    handing.add_argument("-b", "--backend", choices=NAMES, default="local", help="default: local")
    handing.add_argument(
        "--address",
        default="auto",
        help="of a Ray cluster; default: auto, which is RAY_ADDRESS or a Ray on this machine, started if none runs",
    )
    handing.add_argument(
        "--policy",
        metavar="NAME",
        help=f"policy of the queue from now on: {', '.join(LIVE)}; default: unchanged, at first backfill",
    )
    handing.add_argument("--after", type=_id, nargs="+", default=[], metavar="ID", help="run when these jobs are done")
    handing.add_argument("--dry-run", action="store_true", help="only write run directories, and say what would run")
    takes_json(handing)
    listing = command("ps", _ps, "list the jobs that have not ended, and the latest that have", "-n 50 --json")
    listing.add_argument(
        "-n", type=whole_number(), metavar="N", default=20, help="how many that have ended; default: 20"
    )
    takes_json(listing)
    showing = command("show", _show, "print all that is known of a job", "4", ids="1")
    takes_json(showing)
    logs = command("logs", _logs, "print the log of a job", "-f 4", ids="1")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow the log until the job ends; status 1 if it is not done then"
    )
    logs.add_argument("--tail", type=whole_number(0, _MOST_LINES), metavar="LINES", help="only the last lines")
    waiting = command("wait", _wait, "wait until jobs have ended; status 1 if one is not done then", "4 5", ids="+")
    waiting.add_argument("--timeout", type=period, metavar="PERIOD", help="give up after this time, with status 1")
    takes_json(waiting)
    command("cancel", _cancel, "end jobs", "4", ids="+")
    command("resume", _resume, "resume failed or cancelled jobs from their last checkpoint", "4", ids="+")
    command("rm", _remove, "remove jobs that have ended, with their logs, checkpoints and results", "4", ids="+")
    evicting = command(
        "evict", _evict, "remove environments and run directories that no job has used for some time", "--older-than 7d"
    )
    evicting.add_argument(
        "--older-than", type=period, default="30d", metavar="PERIOD", help="time without use; default: 30d"
    )
    takes_json(evicting)
    command("queue", _queue, "be the queue until no job is left, as `submit` starts it in the background", "")
    command("schema", _schema, "print the JSON schema of a description, for editors", "")
    digest = command("digest", _digest, "print the digest of a file or folder, for data sets", "")
    digest.add_argument("path", type=Path)


def _takes_home(parser: argparse.ArgumentParser, default: str | None) -> None:
    text = f"folder of jobs; default: {VARIABLE}, or egeria in the user's folder for data"
    parser.add_argument("--home", type=Path, default=default, help=text)


def _id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"expected the number of a job, as `egeria jobs ps` lists them, got {text!r:.40}"
        raise argparse.ArgumentTypeError(message) from None


def _with_home(run: Callable[..., int], options: argparse.Namespace) -> int:
    if run in (_schema, _digest):
        return run(options)
    home = Home(options.home or Home.default())
    if run is _queue:
        return run(home)
    with home.history() as history:
        return run(options, home, history)


def _submit(options: argparse.Namespace, home: Home, history: History) -> int:
    chosen = backend(options.backend, home, options.address, options.policy)
    compiler = home.compiler(history)
    descriptions = [read_description(path, options.set) for path in options.descriptions]
    for description in descriptions:
        compiled = compiler.compile(description)
        if options.dry_run:
            for one in compiled:
                chosen.check(one)
                tell(options, [_facts(one)], _explained(one))
            continue
        ids = submit(home, history, chosen, compiled, description.folder, options.after)
        for one, id in zip(compiled, ids, strict=True):
            on = ", ".join(choice.method for choice in one.choices if choice.on)
            tell(options, [{"id": id, **_facts(one)}], [f"{id}  {one.name}" + (f"  with {on}" if on else "")])
    return 0


def _facts(one: Compiled) -> dict[str, Any]:
    return {"name": one.name, "run": str(one.path), "methods": [dataclasses.asdict(choice) for choice in one.choices]}


def _explained(one: Compiled) -> Iterator[str]:
    yield f"{one.name}: {printable(one.path)}"
    for line in explanation(one.choices).splitlines():
        yield wrapped(printable(line), get_terminal_size().columns, first="  ", then="    ")


def _ps(options: argparse.Namespace, home: Home, history: History) -> int:
    _refresh(home, history)
    rows = history.unfinished() + history.finished(options.n)
    waits = any(row.backend in SERVED and row.closed is None for row in rows) and not queue_runs(home)
    footer = ["no queue runs: `egeria jobs queue` continues these jobs"] if waits else []
    tell(options, (row.content() for row in rows), [*table(rows, home, width_of_terminal()), *footer])
    return 0


def _refresh(home: Home, history: History) -> None:
    for name in sorted({row.backend for row in history.unfinished()} - {*SERVED}):
        try:
            refresh(home, history, {name: backend(name, home)})
        except (QueueError, OSError) as error:  # the others are shown all the same
            print(f"egeria jobs: {name} jobs as they were last known: {printable(error)}", file=sys.stderr)


def _show(options: argparse.Namespace, home: Home, history: History) -> int:
    _refresh(home, history)
    found = details(history.get(options.id), home)
    tell(options, [found], as_text(found, width_of_terminal()))
    return 0


def _logs(options: argparse.Namespace, home: Home, history: History) -> int:
    history.get(options.id)
    looked, folder = time.monotonic(), home.folder(options.id)
    with files.reading(folder.log, links=False) as log:
        if options.tail is not None:
            sys.stdout.write(b"".join(collections.deque(log, options.tail)).decode(errors="replace"))
        while True:
            state = history.get(options.id).state
            ended = state.final and not folder.is_watched  # the last lines come after the state
            while data := log.read(2**16):
                sys.stdout.write(data.decode(errors="replace"))
            sys.stdout.flush()
            if ended or not options.follow:
                return int(options.follow and state is not State.DONE)
            if time.monotonic() - looked > _BACKENDS_S:
                _refresh(home, history)
                looked = time.monotonic()
            time.sleep(_POLL_S)


def _wait(options: argparse.Namespace, home: Home, history: History) -> int:
    ends = time.monotonic() + options.timeout if options.timeout is not None else float("inf")
    looked = -_BACKENDS_S
    while True:
        if time.monotonic() - looked > _BACKENDS_S:
            _refresh(home, history)
            looked = time.monotonic()
        states = [history.get(id).state for id in options.ids]
        if all(state.final for state in states) or time.monotonic() > ends:
            for id, state in zip(options.ids, states, strict=True):
                tell(options, [{"id": id, "state": state}], [f"{id}  {state}"])
            return int(set(states) != {State.DONE})
        time.sleep(_POLL_S)


def _backend_of(row: Row, home: Home) -> Backend:
    return backend(row.backend, home, row.address)


def _cancel(options: argparse.Namespace, home: Home, history: History) -> int:
    for id in options.ids:
        print(cancel(home, history, _backend_of(history.get(id), home), id))
    return 0


def _resume(options: argparse.Namespace, home: Home, history: History) -> int:
    for id in options.ids:
        resume(home, history, _backend_of(history.get(id), home), id)
        print(f"job {id} is queued again")
    return 0


def _remove(options: argparse.Namespace, home: Home, history: History) -> int:
    for id in options.ids:
        remove(home, history, id)
        print(f"job {id} is removed")
    return 0


def _evict(options: argparse.Namespace, home: Home, history: History) -> int:
    evicted = evict(home, history, options.older_than)
    for kind, names in (("environments", evicted.environments), ("run directories", evicted.runs)):
        text = f"removed {len(names)} {kind}" + (f": {', '.join(names)}" if names else "")
        tell(options, ({"kind": kind, "removed": name} for name in names), [text])
    return 0


def _queue(home: Home) -> int:
    from lightning_egeria.jobs.queue import main as be_the_queue

    return be_the_queue(str(home.path))


def _schema(options: argparse.Namespace) -> int:
    from lightning_egeria.jobs.editors import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _digest(options: argparse.Namespace) -> int:
    from lightning_egeria.jobs.rundirs import digest_of

    print(digest_of(options.path))
    return 0
