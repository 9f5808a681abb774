"""One message for each mistake: the key, the file, and what was probably meant."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_egeria.train import main

MISTAKES = [
    # On the command line.
    ("model.net.dpeth=20", ["model.net.dpeth", "conf/model/resnet20.yaml", "Did you mean 'model.net.depth'?"]),
    ("model=timm model.net.pretraned=1", ["conf/model/timm.yaml", "Did you mean 'model.net.pretrained'?"]),
    ("callbacks.freezing.polcy.tolerance=0.1", ["conf/callbacks/freezing.yaml", "'callbacks.freezing.policy'?"]),
    (
        "callbacks.freezing.policy.tolerence=0.1",
        ["conf/callbacks/freezing.yaml", "policy.tolerance'?"],
    ),
    ("callbacks=none callbacks.freezing.workers=0", ["callbacks.freezing", "conf/callbacks/none.yaml", "It has: none"]),
    ("experiment=cifar10_resnet20 size=smal", ["sizes.smal.", "Did you mean 'sizes.small."]),
    ("modle=resnet56", ["modle", "conf/train.yaml", "Did you mean 'model'?"]),
    (
        "model=resnet57",
        ["model=resnet57", "conf/model", "Did you mean 'resnet56'?", "resnet20, resnet56, timm"],
    ),
    ("experiment=cifar10", ["experiment=cifar10", "conf/experiment", "cifar10_resnet56"]),
    ("model=3", ["must be a string"]),
    ("optimizer.lr=0.2", ["conf/train.yaml", "Did you mean 'model.optimizer.lr'?"]),
    ("trainer.limit_train_batches=2", ["lightning.Trainer takes it", "+trainer.limit_train_batches=2"]),
    ("trainer.limit_train_batch=2", ["conf/trainer/default.yaml", "Did you mean '+trainer.limit_train_batches'?"]),
    ("+callbacks.freezing.polcy=1", ["callbacks.freezing.polcy (the command line)", "'callbacks.freezing.policy'?"]),
    ("~callbacks.frezing", ["callbacks.frezing", "Did you mean 'callbacks.freezing'?"]),
    ("seed=1,2", ["seed=1,2", "add -m", "seed=[1,2]"]),
    ("-m seed=1,2 modle=timm", ["modle", "Did you mean 'model'?"]),
    ("ckpt_path=epoch=1.ckpt", ["cannot be read", "\"ckpt_path='epoch=1.ckpt'\""]),
    ("ckpt_path=nowhere.ckpt", ["ckpt_path=nowhere.ckpt", "no such file"]),
    (
        "callbacks.freezing.policy._target_=lightning_egeria.FrezingPolicy",
        ["callbacks.freezing.policy._target_ (the command line)", "Did you mean 'lightning_egeria.FreezingPolicy'?"],
    ),
    ("data._target_=nowhere.Data", ["data._target_", "No module named 'nowhere'"]),
    ("trainer.accelerator=none", ["trainer: ", "accelerator='none'", "Available names"]),
    ("model.net.depth=21", ["model.net: depth must be 6n + 2", "not 21"]),
    ("callbacks.freezing.policy.tolerance=0", ["callbacks.freezing.policy: tolerance must be greater than 0"]),
]
EXPERIMENTS = [
    # In a file of the user's own.
    (
        "model: {optimizer: {momentun: 0.5}}",
        ["model.optimizer.momentun (MINE)", "'model.optimizer.momentum'?"],
    ),
    (
        "callbacks: {freezing: {polcy: {}}}",
        ["callbacks.freezing.polcy (MINE)", "'callbacks.freezing.policy'?"],
    ),
    ("callbacks: {frezing: {workers: 0}}", ["callbacks.frezing (MINE)", "'callbacks.freezing'?"]),
    ("traner: {max_epochs: 5}", ["traner (MINE)", "Did you mean 'trainer'?"]),
    (
        "data: {batch_size: '${data.chanels}'}",
        ["data.chanels", "(MINE)", "Did you mean 'data.channels'?"],
    ),
    ("defaults: [override /model: resnet57]", ["model=resnet57 (MINE)", "Did you mean 'resnet56'?"]),
    ("defaults: [override /modle: timm]", ["experiment/a", "modle", "Did you mean 'model'?"]),
    ("model: [", ["MINE", "line 3"]),
]


@pytest.fixture
def message_of(tmp_path, monkeypatch, capsys):
    """Run a command that has a mistake; return what the user reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_MAIN_MODULE", "lightning_egeria.train")

    def run(arguments):
        monkeypatch.setattr(sys, "argv", ["egeria-train", *arguments.split()])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        lines = [line for line in output.err.splitlines() if not line.startswith("Error executing job")]
        assert [line[: len("egeria-train: ")] for line in lines] == ["egeria-train: "]
        return lines[0]

    return run


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_a_mistake_on_the_command_line(message_of, arguments, words):
    message = message_of(arguments)
    for word in words:
        assert word in message


@pytest.mark.parametrize(("content", "words"), EXPERIMENTS, ids=[content for content, _ in EXPERIMENTS])
def test_a_mistake_in_a_file(message_of, tmp_path, content, words):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "a.yaml").write_text(f"# @package _global_\n{content}\n")
    message = message_of("--config-dir mine experiment=a")
    for word in words:
        assert word.replace("MINE", "mine/experiment/a.yaml") in message


@pytest.mark.parametrize(
    ("arguments", "module", "words"),
    [
        ("-m hparams_search=tolerance", "hydra_plugins.hydra_optuna_sweeper", ["lightning-egeria[optuna]"]),
        ("-m hydra/launcher=submitit_slurm", "hydra_plugins.hydra_submitit_launcher", ["lightning-egeria[submitit]"]),
        ("logger=tensorboard", "tensorboard", ["logger: ", "`tensorboard`", "pip install"]),
    ],
)
def test_what_is_not_installed_is_named(message_of, arguments, module, words):
    try:
        __import__(module)
    except ImportError:
        message = message_of(arguments)
        for word in words:
            assert word in message
    else:
        pytest.skip(f"{module} is installed")


def test_a_key_of_the_users_own_is_no_mistake(message_of, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nwidth: 21\nmodel: {net: {depth: '${width}'}}\n"
    (tmp_path / "mine" / "experiment" / "a.yaml").write_text(text)
    assert "depth must be 6n + 2" in message_of("--config-dir mine experiment=a")


@pytest.mark.slow
def test_tracebacks_for_who_asks_and_for_errors_that_are_none_of_the_configuration(tmp_path):
    command = [sys.executable, "-m", "lightning_egeria.train"]
    root = str(Path(__file__).parent.parent)

    def errors(*arguments, **variables):
        environment = {"PATH": "", "PYTHONPATH": root, **variables}
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    status, text = errors("modle=timm", HYDRA_FULL_ERROR="1")
    assert status == 1
    assert "Traceback" in text
    status, text = errors("callbacks=none", "trainer=cpu", "trainer.max_epochs=text")  # which Lightning does not check
    assert status == 1
    assert "Traceback" in text
