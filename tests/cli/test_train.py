"""The application, run in this process as the console script runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_egeria.cli.train import main
from lightning_egeria.command import main as egeria
from lightning_egeria.core.profiling import clock
from support.cli import SCRIPTED, SMALL, results
from support.ranks import LOCAL, free_port

COMMAND = (sys.executable, "-m", "lightning_egeria.cli.train")


def test_trains_and_leaves_its_figures(egeria_train, capsys):
    run_dir = egeria_train()

    found = results(run_dir)
    assert set(found) == {"savings", "cache", "selection", "batch_sizes", "metrics", "fit_time_s"}
    assert found["savings"]
    assert {"train/loss", "val/loss", "val/acc"} <= set(found["metrics"])
    assert 0 <= found["metrics"]["val/acc"] <= 1
    assert found["fit_time_s"] > 0
    assert str(run_dir / "savings.json") in capsys.readouterr().out
    assert (run_dir / "log" / "metrics.csv").is_file()


@pytest.mark.parametrize(
    ("precision", "seconds", "said"), [("bf16-mixed", 0.2, True), ("bf16-true", 0.01, False), ("32-true", 0.2, False)]
)
def test_a_precision_without_fast_kernels_is_told(egeria_train, capsys, monkeypatch, precision, seconds, said):
    monkeypatch.setattr(clock, "seconds_of_product", {torch.bfloat16: seconds, torch.float32: 0.01}.get)
    egeria_train(f"+trainer.precision={precision}")
    found = "precision bf16-mixed is slow here: this CPU multiplies matrices in bfloat16 20 times slower"
    assert (found in capsys.readouterr().err) is said


def test_the_help_may_be_cut_off():
    with subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "egeria-train trains a configured model on configured data.\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(60) in (0, 1)  # 0 where all of it was in the pipe already


def test_trains_from_the_cache(egeria_train, tmp_path):
    cache = ["cache=disk", f"cache.cache_dir={tmp_path / 'cache'}", "cache.min_free_bytes=0"]
    run_dir = egeria_train(*SCRIPTED, *cache, "trainer.max_epochs=8")
    found = results(run_dir)["cache"]
    assert found["off"] is None
    assert found["written"] > 40
    assert found["hits"] > 0


def test_trains_with_changing_batch_sizes(egeria_train, tmp_path):
    cache = ["cache=disk", f"cache.cache_dir={tmp_path / 'cache'}", "cache.min_free_bytes=0"]
    sizes = ["goodput=adaptive", "goodput.batch_sizes={2: 16}"]
    found = results(egeria_train(*SCRIPTED, *cache, *sizes, "trainer.max_epochs=2"))
    assert [(change["step"], change["batch_size"]) for change in found["batch_sizes"]] == [(2, 16)]
    assert found["cache"]["off"] is None


def test_trains_on_selected_samples(egeria_train, tmp_path):
    cache = ["cache=disk", f"cache.cache_dir={tmp_path / 'cache'}", "cache.min_free_bytes=0"]
    found = results(egeria_train(*SCRIPTED, *cache, "selecting=queue", "selecting.beta=2", "trainer.max_epochs=4"))
    selection = found["selection"]
    assert selection["scored"] == selection["seen"] * 3 / 4
    assert 0.3 < selection["share"] < 0.8
    assert selection["cost"] == pytest.approx(selection["share"] + 1 / 4)
    assert found["cache"]["off"] is None


def test_trains_without_the_callback(egeria_train):
    assert results(egeria_train("callbacks=none", "logger=none"))["savings"] is None


def test_two_runs_with_one_seed_end_in_the_same_place(egeria_train):
    first, second, other = (
        results(egeria_train("callbacks=none", "logger=none", f"seed={seed}"))["metrics"] for seed in (1, 1, 2)
    )
    assert first == second
    assert first["train/loss"] != other["train/loss"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # a resumed run has a folder of its own
def test_resumes_from_a_checkpoint(egeria_train):
    run_dir = egeria_train("callbacks=none", "logger=none")
    (checkpoint,) = (run_dir / "checkpoints").glob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4

    run_dir = egeria_train("callbacks=none", "logger=none", "trainer.max_epochs=2", f"ckpt_path='{checkpoint}'")

    (checkpoint,) = (run_dir / "checkpoints").glob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 8


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_is_resumed_at_its_end_has_nothing_left_to_do(egeria_train):
    run_dir = egeria_train("logger=none")
    (checkpoint,) = (run_dir / "checkpoints").glob("*.ckpt")
    assert results(egeria_train("logger=none", f"ckpt_path='{checkpoint}'"))["savings"] is None


def test_the_log_of_a_run_says_what_froze_and_when(egeria_train):
    run_dir = egeria_train(*SCRIPTED)
    (line,) = [line for line in (run_dir / "train.log").read_text().splitlines() if "froze" in line]
    assert line.startswith("step 2: froze")


def test_debug_fast_runs_one_batch_and_leaves_no_checkpoint(egeria_train):
    run_dir = egeria_train("debug=fast")
    assert results(run_dir)["savings"] is None
    assert not list(run_dir.rglob("*.ckpt"))


@pytest.mark.filterwarnings("ignore:You requested to overfit")  # Lightning turns shuffling off for it
def test_debug_overfit_learns_one_batch_by_heart(egeria_train):
    small = [override for override in SMALL if "limit_" not in override and "max_epochs" not in override]
    losses = results(egeria_train("debug=overfit", small=small))["metrics"]
    assert losses["train/loss"] < 0.1


def test_debug_profiler_leaves_the_time_of_each_hook(egeria_train):
    report = (egeria_train("debug=profiler") / "fit-hooks.txt").read_text()
    assert "KnowledgeGuidedFreezing.on_train_batch_end" in report


def test_a_run_leaves_all_in_one_folder(egeria_train, tmp_path):
    egeria_train("callbacks=none", "run_dir=here/one", own_folder=False)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert {path.name for path in (tmp_path / "here" / "one").iterdir()} == {
        *(".hydra", "log", "savings.json", "egeria.json", "train.log")
    }


@pytest.mark.slow
def test_jobs_at_the_same_time_share_one_cache(tmp_path):
    """As a launcher starts them that does not wait for one before the next."""
    options = ["cache=disk", f"cache.cache_dir={tmp_path / 'cache'}", "cache.min_free_bytes=0", "trainer.max_epochs=8"]
    jobs = [
        subprocess.Popen([*COMMAND, *SMALL, *SCRIPTED, *options, f"hydra.run.dir={tmp_path / str(job)}"], cwd=tmp_path)
        for job in range(2)
    ]
    assert [job.wait(timeout=200) for job in jobs] == [0, 0]
    found = [results(tmp_path / str(job)) for job in range(2)]
    assert found[0]["metrics"] == found[1]["metrics"]
    assert [run["cache"]["wrong"] for run in found] == [0, 0]
    assert all(run["cache"]["hits"] > 0 for run in found)


@pytest.mark.slow
def test_on_two_processes(tmp_path):
    """Lightning starts the command again for the second one."""
    done = subprocess.run(
        # Several processes decide at evaluation steps only.
        [*COMMAND, *SMALL, "trainer=ddp", *SCRIPTED, "callbacks.freezing.evaluate_every_n_steps=1"],
        cwd=tmp_path,
        env={**os.environ, **LOCAL, "MASTER_PORT": free_port(), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (run_dir,) = tmp_path.glob("runs/*/*")
    # The second process knows the directory of the first, and leaves nothing there but its log.
    assert {path.name for path in run_dir.iterdir()} == {
        *(".hydra", "log", "savings.json", "egeria.json", "train.log"),
        "train_ddp_process_1.log",
    }
    assert done.stdout.count("results in") == 1
    savings = results(run_dir)["savings"]
    assert savings["frozen_depth"] == 1
    assert savings["gradient_bytes_after"] < savings["gradient_bytes_before"]


def test_the_metric_of_a_sweeper_must_be_one_that_is_logged(egeria_train, capsys):
    with pytest.raises(SystemExit) as exit_:
        egeria_train("callbacks=none", "logger=none", "optimized_metric=val/ac")
    assert exit_.value.code == 2
    assert "optimized_metric=val/ac: the run logged no such metric. Did you mean 'val/acc'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("mod", {"model=", "model."}),
        ("model=re", {"model=resnet20", "model=resnet56"}),
        ("callbacks.freezing.policy.tol", {"callbacks.freezing.policy.tolerance="}),
        ("optimizer=adamw model.optimizer.w", {"model.optimizer.weight_decay="}),
    ],
)
def test_completion(egeria_train, monkeypatch, capsys, line, answers):
    monkeypatch.setenv("COMP_LINE", f"egeria-train {line}")
    monkeypatch.setattr(sys, "argv", ["egeria-train", "-sc", "query=bash"])
    main()
    assert set(capsys.readouterr().out.split()) == answers


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="for bash")
def test_completion_in_bash(tmp_path):
    """As the README says to set it up."""
    program = tmp_path / "egeria-train"
    program.write_text(f"#!{sys.executable}\nfrom lightning_egeria.cli.train import main\nmain()\n")
    program.chmod(0o755)
    script = """
        eval "$(egeria-train -sc install=bash)"
        COMP_LINE="egeria-train sched" COMP_POINT=18 COMP_WORDS=(egeria-train sched) COMP_CWORD=1
        hydra_bash_completion
        echo "${COMPREPLY[@]}"
    """
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["scheduler="], done.stderr


def test_a_press_of_the_tab_key_does_not_wait_for_torch():
    program = "import sys, lightning_egeria.cli.train; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.net.depth=21"], ["depth must be 6n + 2", "21"]),  # raised while Hydra instantiates
        (["data=cifar10", "data.root=nowhere"], ["nowhere", "cifar-10-batches-py", "labels.npz"]),  # raised by fit
        (["callbacks.freezing.policy.tolerance=0"], ["tolerance"]),
        (["seed=-1"], ["seed: expected a number from 0 to 4294967295, got -1"]),
        (["callbacks.freezing.layer_modules=[net.layer9]"], ["net.layer9"]),
    ],
)
def test_a_mistake_is_answered_in_one_message_and_exit_code_2(egeria_train, capsys, overrides, words):
    with pytest.raises(SystemExit) as exit_:
        egeria_train(*overrides)

    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (message,) = [line for line in error.splitlines() if line.startswith("egeria-train: ")]
    for word in words:
        assert word in message


def test_runs_can_be_drawn(egeria_train, capsys):
    plain, frozen = egeria_train("callbacks=none"), egeria_train(*SCRIPTED)
    assert egeria(["report", str(plain), str(frozen)]) == 0
    page = (frozen / "report" / "report.html").read_text()
    assert "callbacks=none" in page  # which is what was asked for
    assert "freeze to 1" in page
    assert capsys.readouterr().out.endswith(" pictures\n")
