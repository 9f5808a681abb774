"""Puts every fault into a training job, over and over, and writes a table of what held.

    make test-faults ARGS="[--times 20] [--only NAME ...] [--first-seed 0]"

Every injection is random and follows from its seed. The folder of one that did not hold is kept, and named.
"""

import argparse
import collections
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import lightning
import torch

# Each brings its faults.
import faults.cache
import faults.data
import faults.numbers
import faults.ranks
import faults.trainer
import faults.worker  # noqa: F401
from faults.held import FAULTS, CannotError, Fault

TABLE = Path(__file__).parent / "outcome.md"


def inject(fault: Fault, seed: int) -> tuple[int, str | None]:
    """Inject a fault once.

    Returns:
        How many faults that were, and what did not hold; None: all held.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{fault.name}-{seed}-"))
    try:
        count = fault.inject(random.Random(f"{fault.name} {seed}"), folder)
    except CannotError as error:
        print(f"{fault.name}: {error}", flush=True)
        return 0, None
    except Exception as error:  # also one in the campaign itself
        return 1, f"seed {seed}, kept in {folder}: {''.join(traceback.format_exception(error)[-2:])}"
    shutil.rmtree(folder, ignore_errors=True)
    return count if count is not None else 1, None


def table(rows: list[tuple[Fault, int, int]]) -> str:
    """The outcome in Markdown."""
    lines = ["| | fault | must happen | injected | did not hold |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {f.where} | {f.what} | {f.must} | {injected} | {failed} |" for f, injected, failed in rows]
    about = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {sys.version.split()[0]}"
    return "\n".join([*lines, "", f"`make test-faults`, {about}."]) + "\n"


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write the table to {TABLE.name}")
    options = parser.parse_args()
    rows = []
    for fault in FAULTS:
        if options.only and fault.name not in options.only:
            continue
        began, outcomes = time.monotonic(), []
        for seed in range(options.first_seed, options.first_seed + options.times):
            outcomes.append(inject(fault, seed))
        failures = [failure for _, failure in outcomes if failure is not None]
        rows.append((fault, sum(count for count, _ in outcomes), len(failures)))
        print(f"{time.monotonic() - began:6.0f} s  {fault.name}: {rows[-1][1]} injected, {len(failures)} did not hold")
        for failure, times in collections.Counter(failures).most_common(5):
            print(f"    {times} x {failure}", flush=True)
    if options.write:
        TABLE.write_text(table(rows))
    sys.exit(any(failed for *_, failed in rows))


if __name__ == "__main__":
    main()
