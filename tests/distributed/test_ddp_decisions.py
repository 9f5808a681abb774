"""One rank decides, and all do the same after the same step, whatever goes wrong."""

import functools
import os
import signal
import time

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from lightning_egeria.errors import LayerChainError
from support.agreement import checked
from support.distributed.rank_jobs import Deciding, Module, Net, Watch, active_bytes, data, digest, fit, scripted
from support.models import slow
from support.ranks import all_well, in_ranks


class Sleepy(L.Callback):
    """One rank is slow, now and then."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx % 3 == 0:
            time.sleep(0.05)


def run_guided(extra, ranks=2, nodes=1, background=True, steps=40, **arguments):
    module, watch = Module(), Watch()
    arguments = {"evaluate_every_n_steps": 2, "background": background, "deterministic": True} | arguments
    freezing = checked(KnowledgeGuidedFreezing(Deciding(), **arguments))
    workers = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            workers.append(freezing.comparison.runner.worker is not None)

    fit(module, watch, freezing, Count(), *extra, ranks=ranks, nodes=nodes, steps=steps)
    return watch.digests, [vars(event) for event in freezing.events], max(workers)


@pytest.mark.parametrize(("nodes", "slow"), [slow(1, None), slow(1, 1), (2, 0)])
def test_one_rank_of_the_job_evaluates_and_all_follow(nodes, slow):
    extra = [Sleepy(slow)] if slow is not None else []
    first, second = all_well(in_ranks(2, functools.partial(run_guided, extra, nodes=nodes), nodes=nodes))
    assert first[:2] == second[:2]
    assert first[1], "nothing froze"
    assert (first[2], second[2]) == (True, False)


class Murder(L.Callback):
    """Ends the process of the reference whenever it is seen."""

    def __init__(self, freezing):
        self.freezing = freezing

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        worker = self.freezing.comparison.runner.worker
        if worker is not None:
            worker.kill("it was murdered")


def run_with_murder():
    module, watch = Module(), Watch()
    freezing = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=2, deterministic=True)
    fit(module, watch, Murder(freezing), freezing, steps=40)
    return watch.digests, len(freezing.events), freezing.savings().evaluations_done


def test_a_worker_that_dies_neither_hangs_nor_splits_the_job():
    first, second = all_well(in_ranks(2, run_with_murder))
    assert first[0] == second[0]
    assert len(first[0]) == 40
    assert first[1] == second[1]


def run_lately():
    """Nothing waits for answers: which evaluation freezes is up to the machine, but not that all do the same."""
    module, watch = Module(), Watch()
    freezing = checked(KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1))
    fit(module, watch, freezing, steps=60)
    return watch.digests, [vars(event) for event in freezing.events]


def test_late_answers_leave_the_ranks_equal():
    first, second = all_well(in_ranks(2, run_lately))
    assert first == second


class Starve(L.Callback):
    """The process of the reference gets no time on any core."""

    def __init__(self, freezing):
        self.freezing, self.pids = freezing, set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        worker = self.freezing.comparison.runner.worker if self.freezing.comparison is not None else None
        if worker is not None and worker.pid not in self.pids:
            self.pids.add(worker.pid)
            os.kill(worker.pid, signal.SIGSTOP)


def run_starved():
    os.sched_getaffinity = lambda _: set(range(64))  # of this process: a core looks idle
    module, watch = Module(), Watch()
    freezing = checked(KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=2))
    fit(module, watch, freezing, starving := Starve(freezing), steps=60)
    return watch.digests, [vars(event) for event in freezing.events], len(starving.pids)


def test_a_process_without_an_answer_leaves_the_ranks_equal_and_the_run_freezes():
    first, second = all_well(in_ranks(2, run_starved))
    assert first[:2] == second[:2]
    assert first[1], "nothing froze"
    assert (first[2], second[2]) == (1, 0)


class Still(FreezingPolicy):
    """Looks, at any learning rate, and never freezes."""

    wants_reference, held_back = True, None

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        super().observe(step, plasticity, learning_rate, loss, layer_shares)


def run_still(with_callback):
    module, watch = Module(), Watch()
    still = KnowledgeGuidedFreezing(Still(tolerance=1e-12), evaluate_every_n_steps=2)
    fit(module, watch, *([still] if with_callback else []), steps=20)
    return watch.digests, watch.bytes


def test_nothing_frozen_is_nothing_changed():
    assert all_well(in_ranks(2, run_still, True)) == all_well(in_ranks(2, run_still, False))


def run_between(schedule, every):
    module, freezing = Module(), scripted(schedule, evaluate_every_n_steps=every)
    fit(module, freezing, steps=20)
    return digest(module), [(event.step, event.depth) for event in freezing.events]


def test_a_decision_waits_for_the_next_evaluation_step():
    first, second = all_well(in_ranks(2, run_between, {3: 1, 9: 2, 11: 0, 12: 1}, 5))
    assert first == second
    assert first[1] == [(5, 1), (10, 2), (15, 1)]


class Perturb(L.Callback):
    """Changes a weight on one rank only."""

    def __init__(self, step, rank=1):
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            with torch.no_grad():
                pl_module.net.head.bias[0] += 1


def run_perturbed():
    fit(Module(), Perturb(5), scripted({3: 1, 6: 2}), steps=10)


def test_ranks_that_train_different_models_are_found():
    for result in in_ranks(2, run_perturbed):
        assert isinstance(result.error, AssertionError)
        assert "the parameters of rank 1 are not those of rank 0" in str(result.error)


class Wake(L.Callback):
    """Lets a frozen parameter learn again, on every rank, as somebody else's callback would."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 7:
            pl_module.net.stem[0].weight.requires_grad_(True)


def run_awoken():
    module, watch, freezing = Module(), Watch(), scripted({3: 2, 12: 1}, evaluate_every_n_steps=5)
    fit(module, watch, freezing, Wake(), steps=20)
    return watch.digests, [(event.step, event.depth) for event in freezing.events]


def test_a_parameter_that_wakes_up_ends_freezing_on_all_ranks():
    first, second = all_well(in_ranks(2, run_awoken))
    assert first == second
    assert first[1] == [(5, 2), (10, 0)]
    assert len(set(first[0])) == 20


class Release(L.Callback):
    """Releases the stem after an epoch, as `BackboneFinetuning` does; DDP was made without it."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net.stem.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.net.stem.requires_grad_(True)


def run_released():
    module, watch, freezing = Module(), Watch(), scripted({4: 1})
    fit(module, Release(), watch, freezing, steps=20)
    return watch.digests, watch.bytes, freezing.layer_modules


def test_layers_that_are_released_are_exchanged_from_then_on():
    first, second = all_well(in_ranks(2, run_released))
    assert first == second
    assert first[2] == ["net.stem.0", "net.middle.0", "net.deep.0"]
    assert (first[1][7], first[1][8]) == (active_bytes(Net(), 2), active_bytes(Net(), 0))


class Flat(Module):
    """Nothing here is a layer module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def run_flat(**arguments):
    module = Flat()
    fit(module, scripted({}, **arguments), steps=2)
    return module.net[1].weight.tolist()


def run_flat_named():
    run_flat(layer_modules=["net.1"])


def test_a_model_without_layer_modules_trains_on_all_ranks():
    first, second = all_well(in_ranks(2, run_flat))
    assert first == second


def test_layer_modules_that_are_too_few_are_refused_on_all_ranks():
    first, second = in_ranks(2, run_flat_named)
    assert isinstance(first.error, LayerChainError)
    assert isinstance(second.error, LayerChainError)
    assert str(second.error) == f"on rank 0: {first.error}"


class Uneven(Module):
    """The last batch of an epoch has one sample on each rank."""

    def train_dataloader(self):
        return DataLoader(data(34), batch_size=4, shuffle=True)


def run_uneven():
    module, watch = Uneven(), Watch()
    freezing = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1, deterministic=True, background=False)
    fit(module, watch, freezing, steps=25)
    return watch.digests, [vars(event) for event in freezing.events]


def test_a_smaller_last_batch():
    first, second = all_well(in_ranks(2, run_uneven))
    assert first == second
    assert first[1]
