"""The controls do what their papers say, the harness what it says, and the published tables are what the files give."""

import dataclasses
import functools
import json
import math
import sys

import lightning
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import never_costs
from benchmarks.alternatives import tables
from benchmarks.proof import ages, compare, costs, defaults, figures, inside, loss_by_depth, results, workloads
from benchmarks.proof import run as run_module
from benchmarks.proof.controls import (
    AutoFreeze,
    FreezeOut,
    GradualUnfreezing,
    LinearFreezing,
    ProbeThenTune,
    StaticFreezing,
    two_cycles,
)
from benchmarks.proof.depths import Branching, table
from benchmarks.proof.run import run
from benchmarks.proof.workloads import RESULTS
from lightning_egeria import Freezer, LayerChain
from support.leftovers import REPOSITORY
from support.models import Classifier, fit, images, loader

TINY = ["data.batch_size=16", "data.train_size=64", "data.val_size=40", "model.net.depth=8"]
TINY += ["trainer.max_epochs=3", "trainer.check_val_every_n_epoch=1"]
TINY += ["trainer.precision=32-true"]  # not every CPU has fast kernels for bf16
WORKLOAD = "cifar10_resnet20"


def begun(freezing, max_depth):
    """A callback of a network of so many layer modules and one, and their weights by number."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(max_depth + 2)))
    freezing.freezer = Freezer(net, LayerChain.trace(net, lambda: net(torch.ones(2, 2)).sum()))
    assert freezing.freezer.chain.max_depth == max_depth
    return freezing


def depths(freezing, steps, before=lambda step: None):
    """Frozen depth after each step."""
    found = []
    for step in range(1, steps + 1):
        before(step)
        if (decision := freezing.choose_depth(step)) is not None:
            freezing.freezer.freeze_to(decision.depth, decision.reason)
        found.append(freezing.freezer.depth)
    return found


def test_static_freezing_freezes_once():
    assert depths(begun(StaticFreezing(3, 2), max_depth=2), 5) == [0, 0, 2, 2, 2]
    assert depths(begun(StaticFreezing(3, 0), max_depth=2), 5) == [0] * 5


def test_the_head_learns_first_and_then_everything():
    assert depths(begun(ProbeThenTune(total_steps=7), max_depth=3), 7) == [3, 3, 3, 0, 0, 0, 0]


def test_the_head_and_then_everything_have_a_schedule_each():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1, momentum=0.9)
    schedule, rates = two_cycles(optimizer, 40, max_lr=1, pct_start=0.1), []
    for _ in range(39):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[20:] == pytest.approx(rates[:19])
    assert (rates[1], rates[19]) == (1, pytest.approx(4e-6))


def test_gradual_unfreezing_ends_with_everything():
    found = depths(begun(GradualUnfreezing(total_steps=12, steps_per_epoch=3), max_depth=3), 12)
    assert found == [3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0, 0]
    assert depths(begun(GradualUnfreezing(total_steps=3, steps_per_epoch=3), max_depth=3), 2) == [3, 3]


def test_depths_are_compared_on_the_same_batches():
    branching = Branching([2, 1, 0], steps=8)
    trainer = fit(Classifier(), branching, data=loader(images(128)), max_epochs=5)
    assert trainer.global_step == 2
    assert list(branching.losses) == [2, 1, 0]
    assert {len(losses) for losses in branching.losses.values()} == {8}
    assert len({losses[-1] for losses in branching.losses.values()}) == 3
    head, _, *rows = table(branching.losses).splitlines()
    assert head == "| frozen | 8 steps |"
    assert [row.split(" | ")[0] for row in rows] == ["| 2", "| 1", "| 0"]
    assert rows[-1] == "| 0 | 1.00 |"


def test_linear_freezing_begins_at_half_of_the_run():
    found = depths(begun(LinearFreezing(total_steps=100, steps_per_epoch=10), max_depth=9), 100)
    # After 60, 70, 80, 90 of 100 steps a fifth, two fifths ... of 10 layers; the last never freezes.
    assert [found[step - 1] for step in (50, 59, 60, 69, 70, 80, 90, 99, 100)] == [0, 0, 2, 2, 4, 6, 8, 8, 9]


def test_freezeout_freezes_at_the_cubes_of_a_ramp():
    freezing = begun(FreezeOut(total_steps=1000), max_depth=2)
    assert [freezing.share(layer) for layer in range(4)] == pytest.approx([0.8**3, 0.9**3, 1.0, 1.0])
    found = depths(freezing, 1000)
    assert [found[step - 1] for step in (511, 512, 728, 729, 999)] == [0, 1, 1, 2, 2]


def test_the_gradient_norm_test_freezes_below_the_median():
    freezing = begun(AutoFreeze(total_steps=40, intervals=4), max_depth=4)
    norms = {10: [10.0, 10.0, 10.0, 10.0, 10.0], 20: [10.1, 10.2, 13.0, 9.9, 15.0], 30: [10.1, 10.2, 13.1, 12.0, 14.9]}

    def summed(step):
        freezing.sums = {f"{layer}.weight": torch.tensor(norm) for layer, norm in enumerate(norms.get(step, []))}

    found = depths(freezing, 30, before=summed)
    # At 20 the changes are 0.01, 0.02, 0.3, 0.01, 0.5 with median 0.02, at 30 of the last four 0, 0.008, 0.21, 0.007.
    assert [found[step - 1] for step in (10, 19, 20, 29, 30)] == [0, 0, 1, 1, 2]


class Chain(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.c(self.b(self.a(batch[0]).relu()).relu()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def test_freezeout_is_sgd_with_a_learning_rate_for_each_layer(tmp_path):
    steps = 20
    torch.manual_seed(1)
    images, labels = torch.randn(steps * 4, 4), torch.randint(2, (steps * 4,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    model, freezing = Chain(), FreezeOut(steps, layer_modules=["a", "b", "c"])
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    quiet |= {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path}
    lightning.Trainer(callbacks=[freezing], **quiet).fit(model, loader)
    assert [(event.step, event.depth) for event in freezing.events] == [(11, 1), (15, 2)]

    by_hand = Chain()
    ends = {"a": 0.8**3, "b": 0.9**3, "c": 1.0}
    groups = [{"params": getattr(by_hand, name).parameters(), "end": end} for name, end in ends.items()]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            end = group["end"]
            if step >= end * steps:
                for parameter in group["params"]:
                    parameter.requires_grad_(False).grad = None
            group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps / end))) / end
        optimizer.zero_grad()
        by_hand.training_step((images[step * 4 : step * 4 + 4], labels[step * 4 : step * 4 + 4]), step).backward()
        optimizer.step()
    torch.testing.assert_close([*model.parameters()], [*by_hand.parameters()], rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder with all data: CIFAR-10 of 200 random images."""
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    folder.mkdir()
    generator = np.random.default_rng(0)
    labels = {}
    for split, count in (("train", 200), ("test", 100)):
        rows = count // 10
        mosaic = generator.integers(256, size=(32 * rows, 320, 3), dtype=np.uint8)
        Image.fromarray(mosaic).save(folder / f"{split}.webp", lossless=True)
        labels[f"{split}_labels"] = np.arange(count, dtype=np.uint8) % 10
    np.savez(folder / "labels.npz", **labels)
    return str(folder.parent)


@functools.cache
def _trained(method, data, **arguments):
    return json.dumps(run(WORKLOAD, "small", method, 0, data, overrides=TINY, **arguments))


def trained(method, data, **arguments):
    """The result of a tiny run; each is made once."""
    return json.loads(_trained(method, data, **arguments))


@pytest.fixture
def results_folder(tmp_path, monkeypatch):
    for module in (workloads, results, costs, figures):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    results.costs_of.cache_clear()
    yield tmp_path / "results" / WORKLOAD / "small"
    results.costs_of.cache_clear()


@pytest.mark.parametrize("method", ["slope", "linear", "freezeout", "autofreeze", "calibrated_static", "shortened"])
def test_a_control_trains(data, method):
    steps = 6 if method == "shortened" else None
    arguments = {} if steps is None else {"steps": steps}
    result = trained(method, data, **({"depth": 2} if method == "calibrated_static" else {}), **arguments)
    assert result["method"] == method
    assert [point["step"] for point in result["curve"]] == ([4, 6] if method == "shortened" else [4, 8, 12])
    assert sum(result["curve"][-1]["batches"].values()) == result["steps"]
    if method in ("linear", "calibrated_static"):
        assert result["events"]


def test_a_run_is_repeated_by_its_seed(data):
    again, other = (run(WORKLOAD, "small", "freezing", seed, data, overrides=TINY) for seed in (0, 1))
    runs = (trained("freezing", data), again, other)
    metrics = [[point["metrics"] for point in result["curve"]] for result in runs]
    assert metrics[0] == metrics[1] != metrics[2]


def test_freezing_and_cache_differ_in_the_kinds_of_their_steps(data, results_folder):
    scheduled = "{_target_: lightning_egeria.ScriptedPolicy, schedule: {2: 1}}"
    scripted = ["~callbacks.freezing.policy", f"+callbacks.freezing.policy={scheduled}"]
    results_folder.mkdir(parents=True)
    (results_folder / "plain-0.json").write_text(json.dumps(trained("plain", data)))
    for method in ("freezing", "cached"):
        changes = [*TINY, *scripted, *(["trainer.max_epochs=7"] if method == "cached" else [])]
        result = run(WORKLOAD, "small", method, 0, data, overrides=changes)
        (results_folder / f"{method}-0.json").write_text(json.dumps(result))
    kinds = {path.stem: json.loads(path.read_text())["curve"][-1]["batches"] for path in results_folder.glob("*.json")}
    assert kinds["plain-0"] == {"0": 12}
    assert kinds["freezing-0"] == {"0": 2, "1": 10}
    assert set(kinds["cached-0"]) - {"1 off"} == {"0", "1 miss", "1 hit"}


def test_steps_from_shallower_entries_are_a_kind_of_step(data):
    scheduled = (
        "{_target_: lightning_egeria.ScriptedPolicy, schedule: {1: 1, 20: 3}}"  # with 4 views, 4 epochs of 4 steps
    )
    scripted = ["~callbacks.freezing.policy", f"+callbacks.freezing.policy={scheduled}", "trainer.max_epochs=11"]
    result = run(WORKLOAD, "small", "cached", 0, data, overrides=[*TINY, *scripted])
    batches = result["curve"][-1]["batches"]
    assert sum(batches.values()) == 44
    assert batches["3 from 1"] > 0
    assert batches["3 hit"] > 0


def test_costs_times_and_tables_come_from_the_files(data, results_folder):
    """From runs to the table, by the commands' own functions."""
    for method in ("plain", "static"):
        path = workloads.result_path(WORKLOAD, "small", method, 0)
        path = results_folder / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trained(method, data, **({"depth": 2} if method == "static" else {}))))
    kinds = costs.kinds_of(WORKLOAD, "small")
    assert kinds == {"0", "2"}
    found = {"full": 0.5, "shares": {"2": 0.25}, "asked": sorted(kinds), "about": {"torch": "2", "threads": "1"}}
    (results_folder / "costs.json").write_text(json.dumps(found))
    runs = {run.method: run for run in results.read_all(WORKLOAD, "small")}
    assert runs["plain"].seconds == pytest.approx(12 * 0.5)
    raw = json.loads((results_folder / "static-0.json").read_text())
    overhead = 1 / (1 - raw["evaluation_seconds"] / raw["curve"][-1]["seconds"])
    assert runs["static"].seconds == pytest.approx(overhead * (1 * 0.5 + 11 * 0.125))
    text = figures.table(list(runs.values()), found)
    final = f"{100 * runs['plain'].final:.1f}"
    assert f"| plain | 1 | {final} | - | - | 1.00 | 0.00 | {final} at 1.00 | 1.00 | 1.00x | - |" in text
    assert f"Runs with torch {torch.__version__}, threads: {torch.get_num_threads()}, commits: " in text
    assert text.endswith("Costs of steps with torch 2, threads: 1, commit: unknown.\n")
    assert "| static | 1 |" in text
    fixed = dataclasses.replace(runs["static"], method="frozen2_cached")
    assert "| 2 from the start, with the cache | 1 |" in figures.table([*runs.values(), fixed], found)
    assert figures.picture(list(runs.values()), "val/acc").axes


def test_an_unmeasured_kind_costs_as_much_as_the_nearest():
    shares = {"3": 0.8, "7": 0.4, "7 hit": 0.2}
    assert results.share_of("0", shares) == 1
    assert results.share_of("4", shares) == 0.8
    assert results.share_of("3 hit", shares) == 0.2
    assert results.share_of("3 off", shares) == 0.8
    assert results.share_of("3 score", shares) == 1 / 3
    assert results.share_of("3 hit score", shares) == 0.1
    assert results.share_of("3 hit score", shares | {"3 hit score": 0.05}) == 0.05
    assert results.share_of("6 off", shares | {"7 off": 0.3}) == 0.3
    with pytest.raises(KeyError, match="'7 miss' was not measured"):
        results.share_of("7 miss", {})
    assert results.share_of("7 miss", shares) == results.share_of("7 from 3", shares) == 0.4
    assert results.share_of("7 miss", shares | {"5 miss": 0.7}) == 0.7
    assert results.share_of("7 from 3", shares | {"5 miss": 0.7}) == 0.7
    assert results.share_of("7 from 3", shares | {"5 miss": 0.7, "6 from 3": 0.3, "7 from 5": 0.25}) == 0.3
    assert results.share_of("7 from 4", shares | {"5 miss": 0.7, "5 from 3": 0.3, "6 from 5": 0.25}) == 0.25
    assert results.share_of("4 off", shares | {"7 off": 0.3}) == 0.8


def test_the_time_to_a_target_is_the_plain_runs_over_ours():
    def curve(method, seed, values, seconds):
        points = tuple(results.Point(i, seconds * (i + 1), 0.0, value) for i, value in enumerate(values))
        return results.Run(method, seed, len(values), points, (), (), 0.0, {})

    plain = [curve("plain", 0, (0.5, 0.6, 0.8), 2.0), curve("plain", 1, (0.5, 0.7, 0.7), 2.0)]
    ours = [curve("freezing", 0, (0.5, 0.8, 0.7), 1.0), curve("freezing", 1, (0.5, 0.6, 0.6), 1.0)]
    assert figures.time_to(plain, plain, 1.0) == "1.00x"
    assert figures.time_to(ours, plain, 1.0) == "3.00x in 1 of 2"  # 6 s and 2 s
    assert figures.time_to(ours[1:], plain, 1.0) == "never"
    assert figures.time_to(ours, plain, 0.85) == "2.50x"  # 6 s and 4 s, over 2 s and 2 s


def test_costs_are_shares_of_the_full_step_beside_them(data, monkeypatch, capsys):
    working = {"5": 0.2, "5 hit": 0.1, "5 miss": 0.45, "5 off": 0.4}
    grown = {"3 hit": 0.3, "5 from 3": 0.15, "5 hit": 0.12}
    shares = [{"3": 0.5}, {"5 off": 0.25}, working, grown]
    asked, waiting = [], iter(shares)

    def shares_of(workload, size, data, fit):
        asked.append(tuple(fit)[:3])
        return {kind: (share, 2.0) for kind, share in next(waiting).items()}

    monkeypatch.setattr(costs, "shares_of", shares_of)
    kinds = ["0", "3", "5 hit", "5 miss", "5 off", "5 from 3", "5 from 4"]
    found = costs.measure(WORKLOAD, "small", data, kinds[:-1], rounds=1)
    assert asked == [(3, "", 0), (5, "off", 0), (5, "work", 0), (5, "work", 3)]
    assert found["full"] == 2.0
    assert found["shares"] == {"3": 0.5, "5 from 3": 0.15, "5 hit": 0.1, "5 miss": 0.45, "5 off": 0.25}
    assert capsys.readouterr().out == "round 1 of 1: full step 2000.0 ms\n"
    waiting = iter([*shares, {}])
    assert costs.measure(WORKLOAD, "small", data, kinds, rounds=1)["shares"] == found["shares"]
    assert "not measured, taken to cost what the nearest kind does: 5 from 4" in capsys.readouterr().out


def test_the_cost_of_scoring_is_what_it_adds_to_a_step(data, monkeypatch):
    found = {
        costs.Fit(0, scores=True): {"0": (1.3, 2.0)},
        costs.Fit(5, "work"): {"5 hit": (0.4, 2.0)},
        costs.Fit(5, "work", scores=True): {"5 hit": (0.5, 2.0), "5 miss": (0.9, 2.0)},
    }
    monkeypatch.setattr(costs, "shares_of", lambda workload, size, data, fit: found[fit])
    measured = costs.measure(WORKLOAD, "small", data, ["0", "0 score", "5 hit score"], rounds=1)
    assert measured["shares"] == {"0 score": 0.3, "5 hit": 0.4, "5 hit score": 0.1}


@pytest.mark.slow
def test_kinds_are_measured_by_short_fits(data):
    def kinds_of(*fit):
        found = costs.shares_of(WORKLOAD, "small", data, costs.Fit(*fit), *TINY, "data.batch_size=8")
        assert all(0 < share < 20 and seconds > 0 for share, seconds in found.values())
        return set(found)

    assert kinds_of(0) == {"0"}
    assert kinds_of(1) == {"1"}
    assert {"1 hit", "1 miss"} <= kinds_of(1, "work")
    assert kinds_of(1, "off") == {"1 off"}
    assert "2 from 1" in kinds_of(2, "work", 1)


def test_networks_whose_statistics_settle_take_longer_to_measure():
    assert costs.settles(torch.nn.BatchNorm2d(3, momentum=0.01))
    assert costs.settles(torch.nn.BatchNorm2d(3, momentum=None))
    assert not costs.settles(torch.nn.BatchNorm2d(3))
    assert not costs.settles(torch.nn.LayerNorm(3))


def test_the_length_of_a_short_run_follows_from_ours(data, results_folder):
    results_folder.mkdir(parents=True)
    plain = trained("plain", data)
    ours = trained("static", data, depth=2)
    (results_folder / "plain-0.json").write_text(json.dumps(plain))
    (results_folder / "costs.json").write_text(json.dumps({"full": 1.0, "shares": {"2": 0.25}, "asked": ["0", "2"]}))
    with pytest.raises(SystemExit, match=r"freezing-0\.json is not there"):
        compare.arguments_of("shortened", WORKLOAD, "small", 0)
    (results_folder / "freezing-0.json").write_text(json.dumps(ours | {"evaluation_seconds": 0.0}))
    assert compare.arguments_of("shortened", WORKLOAD, "small", 0) == ["--steps", "4"]  # 1 + 11 / 4 of 12
    with_cache = ours | {"evaluation_seconds": 0.5 * ours["curve"][-1]["seconds"]}
    (results_folder / "cached-0.json").write_text(json.dumps(with_cache))
    assert compare.arguments_of("shortened", WORKLOAD, "small", 0) == ["--steps", "4"]  # the faster of both


def test_a_run_that_no_longer_follows_from_ours_is_made_again(data, results_folder, monkeypatch):
    results_folder.mkdir(parents=True)
    short = trained("shortened", data, steps=4)
    static = trained("static", data, depth=2)
    made = {"plain": trained("plain", data), "freezing": static, "shortened": short}
    for name, result in (made | {"static": static}).items():
        (results_folder / f"{name}-0.json").write_text(json.dumps(result | {"evaluation_seconds": 0.0}))

    def remade(share):
        results.costs_of.cache_clear()
        (results_folder / "costs.json").write_text(json.dumps({"full": 1, "shares": {"2": share}, "asked": ["0", "2"]}))
        asked = []
        monkeypatch.setattr(compare, "train", lambda *given: asked.append(given[2:4] + given[5:]))
        monkeypatch.setattr(
            sys, "argv", ["compare", WORKLOAD, "--data", data, "--seeds", "0", "--methods", *made, "static"]
        )
        compare.main()
        return asked

    assert remade(0.25) == []  # 1 + 11 / 4 of 12 steps
    assert remade(0.5) == [("shortened", 0, ["--steps", "6"])]
    deeper = static | {"evaluation_seconds": 0.0, "events": [{"step": 1, "kind": "freeze", "depth": 3, "reason": ""}]}
    (results_folder / "freezing-0.json").write_text(json.dumps(deeper))
    assert remade(0.25) == [("static", 0, ["--depth", "3"])]


def test_a_comparison_that_was_cut_off_before_its_costs_goes_on(data, results_folder, monkeypatch):
    results_folder.mkdir(parents=True)
    (results_folder / "plain-0.json").write_text(json.dumps(trained("plain", data)))
    asked = []
    monkeypatch.setattr(compare, "train", lambda *given: asked.append(given[2:4]))
    monkeypatch.setattr(costs, "measure_missing", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["compare", WORKLOAD, "--data", data, "--seeds", "0", "--methods", "plain", "freezing"]
    )
    compare.main()
    assert asked == [("freezing", 0)]


@pytest.mark.parametrize(("method", "told"), [("shortened", "steps"), ("static", "depth")])
def test_a_run_that_follows_from_others_must_be_told_how(monkeypatch, capsys, method, told):
    monkeypatch.setattr(sys, "argv", ["run", WORKLOAD, method, "0", "--data", "nowhere"])
    with pytest.raises(SystemExit):
        run_module.main()
    assert f"{method} needs --{told}" in capsys.readouterr().err


def test_one_argument_is_changed_at_a_time(data, results_folder):
    results_folder.mkdir(parents=True)
    (results_folder / "plain-0.json").write_text(json.dumps(trained("plain", data)))
    (results_folder / "costs.json").write_text(json.dumps({"full": 1.0, "shares": {}, "asked": ["0"]}))
    found = dict(compare.variations(WORKLOAD, "small"))
    assert found["tolerance=1e-3"] == ["callbacks.freezing.policy.tolerance=1e-3"]
    assert found["evaluation_samples=16"] == ["callbacks.freezing.evaluation_samples=16"]
    assert found["evaluations=25"] == ["callbacks.freezing.evaluate_every_n_steps=1"]  # of 12 steps
    for overrides in found.values():
        run_module.configured(WORKLOAD, "small", data, overrides)

    plain = results.read_all(WORKLOAD, "small")[0]
    ours = [dataclasses.replace(plain, method=method) for method in ("freezing", "tolerance=1e-3")]
    text = figures.sensitivity([plain, *ours])
    assert "| the defaults | 1 |" in text
    assert "| `tolerance=1e-3` | 1 |" in text
    assert figures.sensitivity([plain]) == ""


def test_the_look_inside(data, results_folder, monkeypatch):
    arguments = ["inside", WORKLOAD, "--data", data]
    tiny = functools.partial(run_module.configured, overrides=TINY)
    monkeypatch.setattr(inside, "configured", tiny)
    monkeypatch.setattr(inside, "RESULTS", results_folder.parents[1])
    monkeypatch.setattr(sys, "argv", arguments)
    inside.main()
    state = json.loads((results_folder / "inside.json").read_text())
    assert state["layer_modules"][:2] == ["net.conv1", "net.layer1.0"]
    assert [entry["step"] for entry in state["likeness"]] == [*range(1, 13), 12]
    assert state["likeness"][-1]["cka"] == pytest.approx([1.0] * len(state["layer_modules"]))
    assert state["likeness"][0]["cka"] != state["likeness"][-1]["cka"]
    assert figures.inside(results_folder / "inside.json", None).axes


def test_the_look_at_the_past(data, monkeypatch, capsys):
    monkeypatch.setattr(ages, "configured", lambda *given: run_module.configured(*given[:3], [*TINY, *given[3]]))
    arguments = ["ages", WORKLOAD, "--data", data, "--depth", "2", "--interval", "1", "--rate", "0.5"]
    monkeypatch.setattr(sys, "argv", arguments)
    ages.main()
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()[-2:]}
    assert rows.keys() == {"nothing frozen", "2 of 5 frozen"}
    assert all(float(value) > 0 for row in rows.values() for value in row)
    assert [len(row) for row in rows.values()] == [4, 4]


def test_measuring_leaves_a_network_as_it_was():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3, momentum=None))
    net[2].eval()
    with ages.measuring(net):
        inputs = torch.arange(12.0).view(4, 3)
        assert torch.allclose(net(inputs).mean(0), torch.zeros(3), atol=1e-5)
    assert [part.training for part in net] == [True, True, False]
    assert [net[0].momentum, net[2].momentum] == [0.1, None]
    assert [int(net[0].running_mean.count_nonzero()), int(net[2].running_mean.count_nonzero())] == [0, 0]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*/table.md")), ids=lambda path: "-".join(path.parts[-3:-1]))
def test_the_published_tables_are_what_the_files_give(path):
    runs = results.read_all(path.parts[-3], path.parts[-2])
    assert path.read_text() == figures.table(runs, results.costs_of(path.parts[-3], path.parts[-2]))
    for name, text in (("short", figures.short_table(runs)), ("sensitivity", figures.sensitivity(runs))):
        beside = path.with_name(f"{name}.md")
        assert (beside.read_text() if beside.is_file() else "") == text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*/table.md")), ids=lambda path: "-".join(path.parts[-3:-1]))
def test_a_panel_has_at_most_five_lines_of_as_many_colors(path):
    runs = results.read_all(path.parts[-3], path.parts[-2])
    shown = figures.panels_of(runs)
    assert {name for names in shown.values() for name in names} == {run.method for run in runs} & {*figures.TITLES}
    for axes in figures.picture(runs, "val/acc").axes:
        colors = [line.get_color() for line in axes.get_lines()]
        assert len(colors) == len({*colors}) <= 5


def test_the_published_losses_are_what_the_files_give():
    assert loss_by_depth.PUBLISHED.read_text() == loss_by_depth.table()


@pytest.mark.parametrize(
    ("method", "batches", "depth"),
    [
        ("plain", {"0": 50}, None),
        ("half", {"0": 1, "4": 49}, 4),
        ("frozen3_cached", {"0": 1, "3 miss": 20, "3 hit": 20, "3 off": 9}, 3),
        ("frozen3_from50", {"0": 2, "3": 48}, None),
        ("cached", {"0": 2, "3 miss": 20, "5 hit": 28}, None),
        ("gradual", {"7": 50}, None),
    ],
)
def test_a_run_counts_for_the_depth_that_it_stays_at(method, batches, depth):
    assert loss_by_depth.depth_of({"method": method, "curve": [{"batches": batches}]}) == depth


def test_the_published_costs_of_the_defaults_are_what_the_files_give():
    assert defaults.PUBLISHED.read_text() == defaults.table()


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_comparison_with_alternatives_is_what_its_lines_give(path):
    assert path.with_suffix(".md").read_text() == tables.table(path.stem, tables.runs_of(path.stem))


def test_the_costs_where_the_cache_cannot_help_are_what_their_lines_give():
    assert never_costs.TABLE.read_text() == never_costs.table()


def test_the_readme_shows_what_its_lines_give():
    ((_, text),) = tables.SUMMARY.findall(figures.README.read_text())
    assert text == tables.summary()


def test_what_a_user_writes_is_counted_without_what_a_plain_run_has():
    assert tables.METHODS["plain"].lines == 0
    assert tables.METHODS["ours"].lines == 1


def test_the_readme_shows_what_the_files_give():
    ((_, text),) = figures.SUMMARY.findall(figures.README.read_text())
    assert text == figures.readme_summary()


def test_the_pages_show_every_table_and_picture():
    page = "".join((REPOSITORY / "docs" / name).read_text() for name in ("proof.md", "proof-tables.md"))
    shown = [
        *(str(path.relative_to(REPOSITORY)) for path in RESULTS.glob("*/*/*.md")),
        *(path.name for path in (REPOSITORY / "docs" / "_static").glob("proof_*.png")),
    ]
    assert shown
    assert [name for name in shown if name not in page] == []
