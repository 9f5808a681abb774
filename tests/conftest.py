"""One seed for all tests, and whatever keeps one test from disturbing the next."""

import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import lightning as L
import pytest
import torch
from lightning.fabric.utilities import registry
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader
from tqdm import tqdm

from support import leftovers, surroundings, untimed

# tqdm's monitor is one thread per process that outlives every progress bar.
tqdm.monitor_interval = 0

# Each Trainer reads the metadata of all installed packages, which takes longer than all else that it does first.
registry.entry_points = functools.cache(registry.entry_points)

# The same inputs every time: what a change did not break does not fail. So more of them find little more.
hypothesis.settings.register_profile("repeatable", derandomize=True, max_examples=40)
hypothesis.settings.load_profile("repeatable")
# pytest tests/fuzz --hypothesis-profile=campaign: as many inputs as there is time for.
hypothesis.settings.register_profile("campaign", max_examples=20_000, derandomize=False, print_blob=True)

# Networks in tests are small: more threads only wait for each other, and for whatever else the machine does.
torch.set_num_threads(1)

# Pytest catches at the root. Without a handler there, Lightning's logger stops propagating when it is imported.
logging.getLogger("lightning.pytorch").propagate = True


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leftovers)


@pytest.fixture(autouse=True)
def _seed() -> None:
    L.seed_everything(0, verbose=False)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums of several threads round otherwise, and what a test runs may have set their number."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning keeps the rank of the last Trainer for the whole process, and only the first rank logs and warns."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


@pytest.fixture(autouse=True)
def _nothing_compiled_left() -> Iterator[None]:
    """The compiler has processes of its own, and that of torch before 2.8 keeps pointers to backends that are gone, and
    asks them when it meets the same code again: a crash, sooner or later (pytorch#155057)."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    workers = sys.modules.get("torch._inductor.async_compile")
    if workers is not None:
        workers.shutdown_compile_workers()


@pytest.fixture(autouse=True)
def _fit_changes_only_what_it_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the process, the user's classes and his loaders before and after each ``fit`` in this process."""
    fit = L.Trainer.fit

    @functools.wraps(fit)
    def fit_watched(trainer: L.Trainer, model: Any, *args: Any, **kwargs: Any) -> None:
        loader = next((one for one in (*args, *kwargs.values()) if isinstance(one, DataLoader)), None)
        with surroundings.watched(loader=loader, objects=[model]):
            fit(trainer, model, *args, **kwargs)

    monkeypatch.setattr(L.Trainer, "fit", fit_watched)


@pytest.fixture(autouse=True)
def _caches_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they do is decided by the time that batches take, and no test depends on that; see `test_policy.py`."""
    for name, value in {"COMPARED_BATCHES": 10**6, **untimed.FREE}.items():
        monkeypatch.setattr(f"lightning_egeria.caching.policy.{name}", value)
