"""Commands run in the process of the tests."""

import itertools
import os
import sys
from collections.abc import Iterator

import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_egeria.cli.train import main
from support.cli import SMALL
from support.leftovers import logging_state, restore_logging


@pytest.fixture(autouse=True)
def _logging_of_hydra_undone() -> Iterator[None]:
    """Hydra configures logging for the whole process, as it may in a command."""
    before = logging_state()
    yield
    restore_logging(before)


@pytest.fixture
def egeria_train(tmp_path, monkeypatch):
    """Run `egeria-train` with overrides from an empty folder; return its run directory, a new one each time."""
    counter = itertools.count()

    def run(*overrides, flags=(), small=SMALL, own_folder=True):
        run_dir = tmp_path / f"run{next(counter)}"
        folder = [f"hydra.run.dir={run_dir}"] if own_folder else []
        monkeypatch.setattr(sys, "argv", ["egeria-train", *flags, *small, *folder, *overrides])
        main()
        return run_dir

    monkeypatch.chdir(tmp_path)
    # Hydra sets it for the process, and each run anew.
    monkeypatch.setitem(os.environ, "HYDRA_MAIN_MODULE", "lightning_egeria.cli.train")
    yield run
    GlobalHydra.instance().clear()
