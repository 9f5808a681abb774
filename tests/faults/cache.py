"""The cache directory is damaged, shared, full, slow, or gone."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from faults.held import CannotError, check, fault, lines, once
from faults.job import CACHE, CHECKPOINT, Job, Net
from faults.processes import AtLine, finish, run, start
from faults.trainer import ended_well, same_as_uninterrupted

PAGE = 4096


def _damaged(folder: Path, damage: Any) -> None:
    """Train, damage what was cached, train again from the beginning."""
    job = Job(folder)
    same_as_uninterrupted(run(job))
    (folder / CHECKPOINT).unlink()
    damage([path for path in sorted((folder / CACHE).rglob("*")) if path.is_file()])
    same_as_uninterrupted(run(job))


@fault("cache", "1 to 100 flipped bits in any of its files", "as without a cache: they are misses")
def bits_flipped(chance: random.Random, folder: Path) -> None:
    def flip(files: list[Path]) -> None:
        for _ in range(chance.choice((1, 10, 100))):
            path = chance.choice([path for path in files if path.stat().st_size])
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)

    _damaged(folder, flip)


@fault("cache", "files cut short, or longer", "as without a cache: what is not there is a miss")
def truncated(chance: random.Random, folder: Path) -> None:
    def cut(files: list[Path]) -> None:
        for path in chance.sample(files, chance.randint(1, len(files))):
            os.truncate(path, chance.randrange(2 * path.stat().st_size + 2))

    _damaged(folder, cut)


@fault("cache", "pages of zeros, of noise, or of another place", "as without a cache: they are misses")
def pages_wrong(chance: random.Random, folder: Path) -> None:
    def overwrite(files: list[Path]) -> None:
        large = [path for path in files if path.stat().st_size > 2 * PAGE]
        for _ in range(chance.randint(1, 8)):
            path = chance.choice(large)
            data = bytearray(path.read_bytes())
            at, other = (chance.randrange(len(data) // PAGE) * PAGE for _ in range(2))
            page = chance.choice((bytes(PAGE), chance.randbytes(PAGE), data[other : other + PAGE]))
            data[at : at + PAGE] = page[: len(data) - at]
            path.write_bytes(data)

    _damaged(folder, overwrite)


@fault("cache", "files deleted, emptied, exchanged, or become folders and links", "as without a cache")
def files_wrong(chance: random.Random, folder: Path) -> None:
    def spoil(files: list[Path]) -> None:
        for path in chance.sample(files, chance.randint(1, len(files))):
            kind = chance.choice(("deleted", "emptied", "noise", "folder", "link"))
            path.unlink()
            if kind == "emptied":
                path.touch()
            elif kind == "noise":
                path.write_bytes(chance.randbytes(chance.randrange(3 * PAGE)))
            elif kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(folder / "elsewhere")

    _damaged(folder, spoil)
    check(not (folder / "elsewhere").exists(), "it wrote through a link")


@fault("cache", "two jobs write at the same time", "both as without a cache")
def two_writers(chance: random.Random, folder: Path) -> None:
    jobs = [Job(folder / name, cache_dir=folder / CACHE) for name in ("first", "second")]
    processes = []
    for job in jobs:
        processes.append(start(job))
        time.sleep(chance.choice((0.0, 0.05, 0.2)))
    for process, job in zip(processes, jobs, strict=True):
        same_as_uninterrupted(finish(process, job))


@fault("cache", "two jobs with different models, one directory, at the same time", "each as without a cache")
def two_models(chance: random.Random, folder: Path) -> None:
    torch.manual_seed(1)
    other = Job(folder / "other", cache_dir=folder / CACHE, net=Net(chance.choice((5, 6, 7))))
    alone = Job(folder / "alone", cached=False, net=other.net)
    job = Job(folder / "job", cache_dir=folder / CACHE)
    processes = [(start(one), one) for one in (job, other)]
    found, beside = (finish(process, one) for process, one in processes)
    same_as_uninterrupted(found)
    check(
        ended_well(beside)["parameters"] == ended_well(run(alone))["parameters"],
        "the second model's parameters are others",
    )


class Limits:
    """Lets the process write no file beyond a size, as a quota does."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


@fault("cache", "a quota: no file grows beyond a random size", "as without a cache, one warning; recording may end")
def quota(chance: random.Random, folder: Path) -> None:
    # Checkpoints need more than that: they are left out.
    job = Job(folder, saves=False)
    ended = run(job, Limits(chance.randrange(20, 60) * 1024))
    result = same_as_uninterrupted(ended)
    once(result["told"], "no more outputs of frozen layers are written: writing to")


@contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    if subprocess.run(["mount", *arguments, str(folder)], capture_output=True, check=False).returncode:
        raise CannotError("mounting a file system is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@fault(
    "cache",
    "a full disk (a file system of 16 to 64 kB)",
    "as without a cache; one warning for each way in which it shows",
)
def disk_full(chance: random.Random, folder: Path) -> None:
    size = f"size={chance.randrange(16, 64)}k,mode=700"
    with _mounted(folder / CACHE, "-t", "tmpfs", "-o", size, "tmpfs"):
        ended = run(Job(folder))
        result = same_as_uninterrupted(ended)
        told = [line for line in result["told"] if "cache" in line]
        check(len(told) > 0, "it was not told")
        for kind in ("max_bytes", "writing to", "is off"):
            check(sum(kind in line for line in told) <= 1, f"told twice: {told}")


@fault("cache", "a read-only file system, with or without entries", "as without a cache; one warning")
def read_only(chance: random.Random, folder: Path) -> None:
    cache = folder / CACHE
    with _mounted(cache, "-t", "tmpfs", "-o", "mode=700", "tmpfs"):
        if chance.random() < 0.5:
            same_as_uninterrupted(run(Job(folder)))
            (folder / CHECKPOINT).unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        ended = run(Job(folder))
        result = same_as_uninterrupted(ended)
        once(result["told"], "Read-only file system")


class Removes:
    """Removes a folder with all that is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@fault("cache", "the directory is removed at any line", "as without a cache")
def removed(chance: random.Random, folder: Path) -> None:
    same_as_uninterrupted(run(Job(folder), AtLine(chance.randrange(lines()), Removes(folder / CACHE)).begin))


class Jumps:
    """The clock of the day stands anywhere within twenty years, each time one looks."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = time.time

    def __call__(self) -> None:
        time.time = lambda: self.now() + self.chance.uniform(-3e8, 3e8)
        time.time_ns = lambda: int(time.time() * 1e9)


@fault("cache", "the clock jumps by up to ten years, files are from the future", "as without a cache")
def clock_jumps(chance: random.Random, folder: Path) -> None:
    job = Job(folder)
    same_as_uninterrupted(run(job, Jumps(chance.randrange(10**6))))
    (folder / CHECKPOINT).unlink()
    for path in (folder / CACHE).rglob("*"):
        moment = time.time() + chance.uniform(-3e8, 3e8)
        os.utime(path, (moment, moment))
    same_as_uninterrupted(run(job, Jumps(chance.randrange(10**6))))


class Slow:
    """Reading takes up to 20 ms, sometimes half a second, as over a network."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def __call__(self) -> None:
        for name in ("pread", "preadv"):
            self._slow(name, getattr(os, name))

    def _slow(self, name: str, read: Any) -> None:
        def slowly(*arguments: Any) -> Any:
            time.sleep(0.5 if self.chance.random() < 0.005 else self.chance.uniform(0, 0.02))
            return read(*arguments)

        setattr(os, name, slowly)


@fault("cache", "reads take up to half a second", "as without a cache")
def slow_reads(chance: random.Random, folder: Path) -> None:
    job = Job(folder)
    same_as_uninterrupted(run(job, Slow(chance.randrange(10**6))))
    (folder / CHECKPOINT).unlink()
    same_as_uninterrupted(run(job, Slow(chance.randrange(10**6))))
