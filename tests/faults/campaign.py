"""Puts every fault into a training job, over and over, and writes a table of what held.

    make test-faults ARGS="[--times 20] [--only NAME ...] [--first-seed 0]"

Every injection is random and follows from its seed. The folder of one that did not hold is kept, and named.
"""

import argparse
import json
import platform
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

OUTCOME = Path(__file__).parent / "outcome.json"
TABLE = OUTCOME.with_suffix(".md")


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


def table(outcome: dict[str, list[int]]) -> str:
    """The outcome in Markdown."""
    lines = ["| | fault | must happen | injected | did not hold |", "| --- | --- | --- | --- | --- |"]
    for fault in FAULTS:
        injected, failed = outcome.get(fault.name, (0, 0))
        lines.append(f"| {fault.where} | {fault.what} | {fault.must} | {injected} | {failed} |")
    about = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    return "\n".join([*lines, "", f"`make test-faults`, {about}."]) + "\n"


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", nargs="+", help="the others keep what they have in the table")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    outcome = json.loads(OUTCOME.read_text()) if options.only and OUTCOME.is_file() else {}
    for fault in FAULTS:
        if options.only and fault.name not in options.only:
            continue
        began = time.monotonic()
        found = [inject(fault, seed) for seed in range(options.first_seed, options.first_seed + options.times)]
        failures = [failure for _, failure in found if failure is not None]
        outcome[fault.name] = [sum(count for count, _ in found), len(failures)]
        seconds = time.monotonic() - began
        print(f"{seconds:6.0f} s  {fault.name}: {outcome[fault.name][0]} injected, {len(failures)} did not hold")
        for failure in failures[:5]:
            print(f"    {failure}", flush=True)
        OUTCOME.write_text(json.dumps(outcome, indent=1) + "\n")
        TABLE.write_text(table(outcome))
    sys.exit(any(failed for _, failed in outcome.values()))


if __name__ == "__main__":
    main()
