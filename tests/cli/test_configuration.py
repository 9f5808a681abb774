"""One message for each mistake: the key, the file, and what was probably meant."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_egeria.cli.train import main

MISTAKES = [
    # No such key, option or argument.
    ("model.net.dpeth=20", ["model.net.dpeth: no such key.", "Did you mean 'model.net.depth'?"]),
    ("model=timm model.net.pretraned=1", ["Did you mean 'model.net.pretrained'?"]),
    ("callbacks.freezing.polcy.tolerance=0.1", ["callbacks.freezing.polcy", "'callbacks.freezing.policy'?"]),
    ("callbacks.freezing.policy.tolerence=0.1", ["policy.tolerence", "policy.tolerance'?"]),
    ("callbacks=none callbacks.freezing.timeout_s=9", ["callbacks.freezing: no such key. Keys: none"]),
    ("cache.augmentation_view=4", ["cache.augmentation_view: no such key.", "'cache.augmentation_views'?"]),
    ("augmentation_view=4", ["augmentation_view: no such key.", "Did you mean 'cache.augmentation_views'?"]),
    ("callbacks.freezing.tolerence=1", ["Did you mean 'callbacks.freezing.policy.tolerance'?"]),
    ("modle=resnet56", ["modle: no such key.", "Did you mean 'model'?"]),
    ("callbacks.freezing.tolerance=0.1", ["Did you mean 'callbacks.freezing.policy.tolerance'?"]),
    ("model.lr=0.2", ["Did you mean 'model.optimizer.lr'?"]),
    ("optimizer.lr=0.2", ["optimizer: no such key.", "Did you mean 'model.optimizer.lr'?"]),
    ("trainer.limit_train_batches=2", ["lightning.Trainer does", "+trainer.limit_train_batches=2"]),
    ("trainer.limit_train_batch=2", ["Did you mean '+trainer.limit_train_batches'?"]),
    ("+callbacks.freezing.polcy=1", ["callbacks.freezing.polcy: ", "'callbacks.freezing.policy'?"]),
    ("~callbacks.frezing", ["'callbacks.frezing' does not exist"]),
    ("-m seed=1,2 modle=timm", ["modle", "Did you mean 'model'?"]),
    ("model=resnet57", ["model=resnet57: ", "Did you mean 'resnet56'?", "resnet20, resnet56, timm"]),
    ("experiment=cifar10", ["experiment=cifar10: ", "cifar10_resnet56"]),
    ("experiment=cifar10_resnet20 size=smal", ["sizes.smal.", "Did you mean 'sizes.small."]),
    (
        "callbacks.freezing.policy._target_=lightning_egeria.FrezingPolicy",
        ["callbacks.freezing.policy._target_: ", "Did you mean 'lightning_egeria.FreezingPolicy'?"],
    ),
    ("data._target_=nowhere.Data", ["data._target_: ", "No module named 'nowhere'"]),
    # Not of the type.
    ("trainer.max_epochs=abc", ["trainer.max_epochs: lightning.Trainer expects", "int", "got 'abc'"]),
    ("trainer.max_epochs=1.5", ["trainer.max_epochs: lightning.Trainer expects", "got 1.5"]),
    ("seed=abc", ["seed: egeria-train expects int, got 'abc'"]),
    ("run_dir=[a]", ["'${run_dir}': Cannot convert 'ListConfig' to string"]),
    (
        "callbacks.freezing.policy.tolerance=high",
        ["callbacks.freezing.policy.tolerance: lightning_egeria.FreezingPolicy expects float, got 'high'"],
    ),
    ("callbacks.freezing.policy=calm", ["callbacks.freezing.policy: ", "expects", "Policy", "got 'calm'"]),
    (
        "callbacks.freezing.reference_precision=int4",
        ["callbacks.freezing.reference_precision: ", "'bf16'", "got 'int4'"],
    ),
    ("data.batch_size=many", ["data.batch_size: lightning_egeria.demos.data.DigitsData expects int, got 'many'"]),
    ("model.optimizer.lr=fast", ["model.optimizer.lr: torch.optim.SGD expects", "float", "got 'fast'"]),
    ("cache=disk cache.max_bytes=lots", ["cache.max_bytes: lightning_egeria.FrozenPrefixCache expects", "got 'lots'"]),
    (
        "goodput=adaptive goodput.max_batch_size=1.5",
        ["goodput.max_batch_size: lightning_egeria.AdaptiveBatchSize", "1.5"],
    ),
    ("goodput=adaptive goodput.max_batch_sise=8", ["goodput.max_batch_sise: no such key", "'goodput.max_batch_size'?"]),
    (
        "callbacks=[freezing,partal]",
        ["callbacks=partal: no such option. Did you mean 'partial'? Options: finetuning, freezing, none, partial"],
    ),
    ("goodput=adaptve", ["goodput=adaptve: no such option. Did you mean 'adaptive'?"]),
    ("goodput=adaptive goodput.schedule_by=week", ["goodput: schedule_by must be one of", "'week'"]),
    ("model=3", ["must be a string", "model=3"]),
    # Not an override.
    ("foo", ["cannot read foo as an override. Write key=value"]),
    ("ckpt_path=epoch=1.ckpt", ["cannot read", "\"ckpt_path='VALUE'\""]),
    ("seed=1,2", ["seed=1,2", "--multirun", "[value1,value2]"]),
    # Out of range.
    ("ckpt_path=nowhere.ckpt", ["ckpt_path=nowhere.ckpt", "no such file"]),
    ("trainer.accelerator=none", ["trainer: ", "accelerator='none'", "Available names"]),
    ("model.net.depth=21", ["model.net: depth must be 6n + 2", "got 21"]),
    ("callbacks.freezing.policy.tolerance=0", ["callbacks.freezing.policy: tolerance must be greater than 0"]),
]
EXPERIMENTS = [
    # In a file of the user's own.
    ("model: {optimizer: {momentun: 0.5}}", ["model.optimizer.momentun: ", "'model.optimizer.momentum'?"]),
    ("callbacks: {freezing: {polcy: {}}}", ["callbacks.freezing.polcy: ", "'callbacks.freezing.policy'?"]),
    ("callbacks: {frezing: {timeout_s: 0}}", ["callbacks.frezing: ", "'callbacks.freezing'?"]),
    ("traner: {max_epochs: 5}", ["traner: no such setting. Did you mean 'trainer'?"]),
    ("cache: {cache_dir: here}", ["cache: expected a _target_, got none. Set cache=disk as well"]),
    ("goodput: {max_batch_size: 8}", ["goodput: expected a _target_, got none. Set goodput=adaptive as well"]),
    ("data: {batch_size: '${data.chanels}'}", ["'data.chanels'", "Did you mean 'data.channels'?"]),
    ("defaults: [override /model: resnet57]", ["model=resnet57: ", "Did you mean 'resnet56'?"]),
    ("defaults: [override /modle: timm]", ["experiment/a", "'modle'"]),
    ("model: [", ["mine/experiment/a.yaml", "line 3"]),
]


@pytest.fixture
def message_of(tmp_path, monkeypatch, capsys):
    """Run a command that has a mistake; return what the user reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_MAIN_MODULE", "lightning_egeria.cli.train")

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
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "modules", "words"),
    [
        ("-m hparams_search=tolerance", ["hydra_plugins.hydra_optuna_sweeper"], ["lightning-egeria[optuna]"]),
        ("-m hydra/launcher=submitit_slurm", ["hydra_plugins.hydra_submitit_launcher"], ["lightning-egeria[submitit]"]),
        ("logger=tensorboard", ["tensorboard", "tensorboardX"], ["logger: ", "`tensorboard`", "pip install"]),
    ],
)
def test_what_is_not_installed_is_named(message_of, arguments, modules, words):
    for module in modules:  # one of them is enough
        with contextlib.suppress(ImportError):
            __import__(module)
            pytest.skip(f"{module} is installed")
    message = message_of(arguments)
    for word in words:
        assert word in message


def test_a_key_of_the_users_own_is_no_mistake(message_of, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nwidth: 21\nmodel: {net: {depth: '${width}'}}\n"
    (tmp_path / "mine" / "experiment" / "a.yaml").write_text(text)
    assert "depth must be 6n + 2" in message_of("--config-dir mine experiment=a")


@pytest.mark.slow
def test_tracebacks_on_request_and_for_other_errors(tmp_path):
    command = [sys.executable, "-m", "lightning_egeria.cli.train"]
    root = str(Path(__file__).parents[2])

    def errors(*arguments, **variables):
        environment = {"PATH": "", "PYTHONPATH": root, **variables}
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    status, text = errors("modle=timm", HYDRA_FULL_ERROR="1")
    assert status == 1
    assert "Traceback" in text
    status, text = errors("callbacks=none", "trainer=cpu", "model.num_classes=3")  # fewer than the data set has
    assert status == 1
    assert "Traceback" in text
