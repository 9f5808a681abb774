"""Checkpoints of several ranks."""

import functools

import lightning as L
import pytest

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from support.distributed.rank_jobs import Module, Net, Watch, active_bytes, digest, fit, scripted
from support.models import slow
from support.ranks import all_well, in_ranks


def save(path, ranks, **kwargs):
    module = Module()
    freezing = scripted({3: 1, 6: 2})
    trainer = fit(module, freezing, ranks=ranks, steps=8, **kwargs)
    trainer.save_checkpoint(path)
    return digest(module), freezing.frozen_depth


def resume(path, ranks, **kwargs):
    module, watch, freezing = Module(), Watch(), scripted({3: 1, 6: 2, 12: 0})
    arguments = {"ckpt_path": path} | kwargs
    fit(module, *([watch] if ranks > 1 else []), freezing, ranks=ranks, steps=15, **arguments)
    return digest(module), watch.bytes, [(event.step, event.depth) for event in freezing.events]


@pytest.mark.parametrize(("before", "after"), [slow(2, 2), slow(1, 2), (2, 1), (2, 4)])
def test_a_checkpoint_of_some_ranks_resumes_on_others(before, after, tmp_path):
    path = str(tmp_path / "run.ckpt")
    alone = {"strategy": "auto"}
    all_well(in_ranks(before, functools.partial(save, path, before, **(alone if before == 1 else {}))))
    results = all_well(in_ranks(after, functools.partial(resume, path, after, **(alone if after == 1 else {}))))
    assert all(result == results[0] for result in results)
    assert results[0][2] == [(3, 1), (6, 2), (12, 0)]
    net = Net()
    if after > 1:
        assert results[0][1] == [active_bytes(net, depth) for depth in (2, 2, 2, 2, 0, 0, 0)]


def run_deterministic(path, resumed):
    module = Module()
    policy = FreezingPolicy(pretrained=True, trial=False, peer_tolerance=0.9)
    freezing = KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=3, deterministic=True, background=False)
    saved = L.pytorch.callbacks.ModelCheckpoint(path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
    if resumed:
        fit(module, freezing, steps=30, ckpt_path=f"{path}/step={resumed}.ckpt")
    else:
        fit(module, freezing, saved, steps=30, enable_checkpointing=True)
    return digest(module), [vars(event) for event in freezing.events]


@pytest.mark.parametrize("step", [8, slow(16)])
def test_a_resumed_deterministic_run_is_the_uninterrupted_one(step, tmp_path):
    whole = all_well(in_ranks(2, run_deterministic, str(tmp_path), None))
    resumed = all_well(in_ranks(2, run_deterministic, str(tmp_path), step))
    assert whole == resumed
    assert [event["step"] for event in whole[0][1]] == [9]
