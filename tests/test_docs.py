"""The documentation says what is so: its code runs, the messages that it explains exist, and it builds."""

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from lightning.pytorch import callbacks as pl_callbacks
from ranks import LOCAL, free_port
from test_documents import Data, Module

import lightning_egeria

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ORIGINAL_TRAINER = L.Trainer
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
TROUBLESHOOTING = DOCS / "troubleshooting.md"
SOURCES = sorted((ROOT / "lightning_egeria").rglob("*.py"))


def blocks(opening):
    pattern = re.compile(rf"^```{opening}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
        for path in PAGES
        for number, block in enumerate(pattern.findall(path.read_text()))
    ]


RUN = blocks("python")
SEVERAL_PROCESSES = blocks(r"\{code-block\} python")


def small_trainer(*args, **kwargs):
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    kwargs = {**quiet, "enable_model_summary": False, "limit_train_batches": 2, "limit_val_batches": 1, **kwargs}
    if any(isinstance(callback, pl_callbacks.ModelCheckpoint) for callback in kwargs.get("callbacks", ())):
        kwargs["enable_checkpointing"] = True
    return ORIGINAL_TRAINER(*args, **{**kwargs, "max_epochs": min(3, kwargs.get("max_epochs", 2))})


def without_download(create_model, *args, **kwargs):
    return create_model(*args, **{**kwargs, "pretrained": False})


def test_nearly_all_blocks_run():
    assert len(RUN) >= 15
    assert len(SEVERAL_PROCESSES) == 2


@pytest.mark.filterwarnings("ignore:.*SWA")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # the snippet resumes in one process
@pytest.mark.filterwarnings("ignore:freezing. nothing froze")  # one epoch is too short for what they schedule
@pytest.mark.parametrize("block", RUN)
def test_runs(block, monkeypatch, tmp_path):
    if "EMAWeightAveraging" in block and not hasattr(pl_callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(L, "Trainer", small_trainer)
    monkeypatch.setattr(timm, "create_model", functools.partial(without_download, timm.create_model))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    exec(compile(block, "block", "exec"), {"model": Module(), "datamodule": Data()})


@pytest.mark.slow
@pytest.mark.parametrize("block", SEVERAL_PROCESSES)
def test_runs_on_two_processes(block, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import functools\nimport lightning as L\nimport torch\nfrom torch import nn\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        f"{inspect.getsource(Module)}\n{inspect.getsource(Data)}\n"
        "L.Trainer = functools.partial(L.Trainer, accelerator='cpu', max_epochs=2, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)\n"
        f"model, datamodule = Module(), Data()\n{block}\n"
        "assert trainer.world_size == 2 and trainer.state.finished and trainer.global_step == 4\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PL_"))}
    environment = {**inherited, **LOCAL, "PYTHONPATH": str(ROOT), "MASTER_PORT": free_port()}
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
    run = subprocess.run([sys.executable, script], **options)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_quickstart_freezes_a_layer(monkeypatch, tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    told = {}
    with pytest.warns():  # what Lightning advises a newcomer
        exec(compile(script, "first.py", "exec"), told)
    assert told["freezing"].frozen_depth > 0
    assert told["trainer"].callback_metrics["val/acc"] > 0.9


@functools.cache
def templates():
    """Every text in the package with ``...`` for each value that is put in."""
    found = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        found |= {text_of(node) for node in ast.walk(tree)} - {None}
    return found


def text_of(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [value.value if isinstance(value, ast.Constant) else "..." for value in node.values]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or "...") + (right or "...")
    return None


def explained():
    """The messages that the page on troubleshooting quotes."""
    quoted = re.findall(r"^```text\n(.*?)^```", TROUBLESHOOTING.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in quoted for line in block.splitlines()]


@pytest.mark.parametrize("message", explained())
def test_a_message_that_is_explained_exists(message):
    assert any(message in text for text in templates())


def reasons():
    """Every warning, error and reason for which the cache is off, as `templates`."""
    errors = {"CheckpointError", "DisagreementError", "LayerChainError", "TrainingDataError", "UnsupportedError"}
    of_cache = {"CacheError", "Findings", "Proof", "Verdict", "_NotCompiledError", "_RowsDifferError", "_TalksError"}
    for path in SOURCES:
        if (
            "demos" in path.parts or path.name == "int8.py"
        ):  # int8 is left for another precision, and says so in the log
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in errors | of_cache | {"_stop", "_start_over", "_end", "rank_zero_warn"} and node.args:
                    yield from (text_of(argument) for argument in node.args[:2])
            elif isinstance(node, ast.FunctionDef) and node.name in ("why_not", "_reason_against", "_differs"):
                returned = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
                yield from (text_of(value) for value in returned if value is not None)


def test_every_reason_is_explained():
    quoted = explained()
    wanted = {text for text in reasons() if text is not None and len(re.findall(r"\w+", text)) > 3}
    assert len(wanted) > 40
    missing = {text for text in wanted if not any(line in text for line in quoted)}
    assert not missing


@pytest.mark.slow
def test_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    folders = [DOCS, tmp_path / "pages", "--doctree-dir", tmp_path / "trees"]
    built = subprocess.run([*command, *folders], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    titles = {path.relative_to(DOCS).with_suffix(".html") for path in PAGES if path.is_relative_to(DOCS)}
    assert all((tmp_path / "pages" / title).stat().st_size > 5000 for title in titles)
    api = (tmp_path / "pages" / "api.html").read_text()
    assert all(f'id="lightning_egeria.{name}"' in api for name in lightning_egeria.__all__)
