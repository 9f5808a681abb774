"""A further method has the three places of docs/extending.md, and gets all the rest from them."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from support.leftovers import REPOSITORY

TESTS = """
tests/test_contract.py tests/training/test_methods.py tests/cli/test_configs.py tests/jobs/test_experiments.py
tests/jobs/test_tables.py
"""
PROGRAM = """
import sys
from pathlib import Path
import lightning as L
from lightning_egeria import KnowledgeGuidedFreezing, RunRecorder, SmallGradients
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.report import RunRecord, figures
sys.path.insert(0, "tests")
from support.models import Classifier, fit

fit(Classifier(), SmallGradients(share=1, patience=3), RunRecorder("egeria.json"))
record = RunRecord.read(Path("egeria.json"))
assert [event["depth"] for event in record.events] == [1, 2]
assert {"gradients", "depth", "step_time"} <= set(figures(record))
try:
    fit(Classifier(), SmallGradients(), KnowledgeGuidedFreezing())
except UnsupportedError as error:
    print(error)
"""


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_places(tmp_path):
    for name in ("lightning_egeria", "conf", "docs", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    page = (REPOSITORY / "docs" / "extending.md").read_text()

    def block(language, start):
        (found,) = [one for one in re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.M) if start in one]
        return found

    def run(*command):
        options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}, "capture_output": True}
        done = subprocess.run([sys.executable, *command], **options, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Its folder.
    folder = tmp_path / "lightning_egeria" / "methods" / "gradients"
    folder.mkdir()
    (folder / "__init__.py").write_text(block("python", "METHOD ="))
    code = block("python", "class SmallGradients")
    code = code[: code.index("\n\ntrainer =")]
    (folder / "callback.py").write_text(f"from lightning_egeria.methods.gradients import METHOD\n{code}")
    replace(folder / "callback.py", "\n\n    def __init__", "\n\n    egeria_method = METHOD\n\n    def __init__")
    (folder / "README.md").write_text("# Freezing by gradients: method card\n")
    # Its option.
    (tmp_path / "conf" / "callbacks" / "gradients.yaml").write_text(block("yaml", "SmallGradients"))
    # Its tests.
    contract, line = tmp_path / "tests" / "support" / "methods.py", block("text", "SmallGradients")
    replace(contract, "    SlopePolicy,\n", "    SlopePolicy,\n    SmallGradients,\n")
    replace(contract, "METHODS = {\n", f"METHODS = {{\n{line}")
    # And its public name.
    with (tmp_path / "lightning_egeria" / "__init__.pyi").open("a") as stub:
        stub.write("from lightning_egeria.methods.gradients.callback import SmallGradients as SmallGradients\n")

    run("-m", "docs.tables")
    for document, line in {
        "methods.md": "| **gradients** (`SmallGradients`) | no | yes | yes | | yes | no | yes | yes |",
        "support.md": "| [gradients](cards/gradients.md) | yes | yes | yes | yes | yes |",
        "egeria-train.md": "| [gradients](cards/gradients.md) | `callbacks=gradients` |",
        "cards/gradients.md": "```{include} ../../lightning_egeria/methods/gradients/README.md",
    }.items():
        assert f"{line}\n" in (tmp_path / "docs" / document).read_text()
    refused = "freezing and gradients cannot train in one run: both decide which layer modules are frozen."
    assert refused in run("-c", PROGRAM)
    temporary = f"--basetemp={tmp_path / 't'}"  # and a short name of this test: sockets have paths of 107 characters
    options = ["-p", "no:cacheprovider", temporary, "-q", "-k", "gradients or SmallGradients"]
    passed = run("-m", "pytest", *options, *TESTS.split())
    assert "18 passed" in passed  # 13 of them of the contract
