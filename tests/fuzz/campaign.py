"""Gives the readers of the package a million damaged inputs, and tells what came of them.

    PYTHONPATH=tests python -m fuzz.campaign [--inputs 1000000] [--seed 0] [--only NAME ...] [--keep FOLDER]

Everything follows from the seed. Memory is limited: an allocation much larger than its input is an error like others.
Needs Linux, which tells how much was taken.
"""

import argparse
import collections
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from fuzz.formats import EXACT, MISS, OTHER, Format, formats
from fuzz.mutations import mutated

MEMORY_BYTES = 64 * 2**20  # that reading may take beyond what the process has at the beginning
LONGEST_S = 10.0  # for one input, on a machine that does other things too
SHARED_MEMORY = Path("/dev/shm")  # a file system without a disk, where there is one


def memory(name: str) -> int:
    """Of this process, in bytes: ``VmSize`` that it may use, ``VmRSS`` that it uses, ``VmHWM`` the most it has used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def give(tested: Format, count: int, seed: int, keep: Path | None) -> tuple[collections.Counter[str], int, float]:
    """Have one reader read.

    Returns:
        How often what came of it, the largest memory that it took at once, and the seconds.
    """
    generator = random.Random(f"{tested.name} {seed}")
    outcomes: collections.Counter[str] = collections.Counter()
    Path("/proc/self/clear_refs").write_text("5")  # the most that was used, from here on
    before, limits = memory("VmRSS"), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + MEMORY_BYTES, limits[1]))
    began = time.perf_counter()
    try:
        for number in range(count):
            data = mutated(generator, tested.seeds, tested.json_from, tested.edits)
            start = time.perf_counter()
            try:
                outcome = tested.read(data)
                if time.perf_counter() - start > LONGEST_S:
                    raise TimeoutError(f"{time.perf_counter() - start:.1f} s")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = f"BAD {type(error).__name__}"
                if not outcomes[outcome]:
                    print(f"{tested.name}, input {number}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{tested.name}-{type(error).__name__}".replace(" ", "_")).write_bytes(data)
            outcomes[outcome] += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return outcomes, memory("VmHWM") - before, time.perf_counter() - began


def main() -> int:
    """Run the campaign; returns 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="names of formats")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that were not read as they must be")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        chosen = [f for f in formats(Path(folder)) if not options.only or f.name in options.only]
        whole = sum(tested.share for tested in chosen)
        for tested in chosen:
            count = round(options.inputs * tested.share / whole)
            outcomes, most, seconds = give(tested, count, options.seed, options.keep)
            bad = sum(times for outcome, times in outcomes.items() if outcome.startswith("BAD"))
            errors = {o: n for o, n in outcomes.items() if o not in (EXACT, MISS, OTHER) and not o.startswith("BAD")}
            told = ", ".join(f"{name} {times}" for name, times in sorted(errors.items())) or "-"
            kinds = [str(outcomes[kind]) for kind in (EXACT, MISS, OTHER)]
            rows.append(
                [tested.name, str(count), *kinds, told, str(bad), f"{most / 2**20:.1f}", f"{count / seconds:.0f}"]
            )
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
    head = [
        "format",
        "inputs",
        "exact",
        "miss",
        "other",
        "documented error",
        "wrong or crash",
        "MiB at most",
        "inputs/s",
    ]
    print("\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]))
    return int(any(row[6] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
