"""What is installed is what is in the repository: the packages, the configuration, the command."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import lightning_egeria

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def requirements_of(parser):
    """The requirements that setup.cfg names, on their own or in an extra."""
    texts = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith(("%", "#"))]


FLAWS = tomllib.loads((REPOSITORY / "tests" / "published_flaws.toml").read_text())["flaw"]


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: f"{flaw['package']} {flaw['identifier']}")
def test_no_version_with_a_published_flaw_is_let_in(flaw, setup_cfg):
    found = [one for one in requirements_of(setup_cfg) if one.name == flaw["package"]]
    assert found
    assert re.fullmatch(r"(CVE-\d{4}|GHSA)-[\w-]+", flaw["identifier"])
    for requirement in found:
        for version in flaw.get("versions", ()):
            assert version not in requirement.specifier
        if "fixed" in flaw:
            least = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
            assert least
            assert max(least) >= Version(flaw["fixed"])


def test_the_oldest_versions_tried_have_no_published_flaw():
    lines = (REPOSITORY / "constraints" / "oldest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if "==" in line)
    for flaw in FLAWS:
        version = tried.get(flaw["package"])
        if version is not None:
            assert version not in flaw.get("versions", ())
            assert Version(version) >= Version(flaw.get("fixed", "0"))


def test_the_version_is_that_of_the_package(setup_cfg):
    assert setup_cfg["metadata"]["version"] == "attr: lightning_egeria.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_egeria.__version__)
    assert f"## [{lightning_egeria.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_oldest_versions_tried_are_the_lower_bounds(setup_cfg):
    requirements = [setup_cfg["options"]["install_requires"], *setup_cfg["options.extras_require"].values()]
    bounds = {
        line.split(">=")[0].split("[")[0].strip(): line.split(">=")[1].split(",")[0].strip()
        for requirement in requirements
        for line in requirement.splitlines()
        if ">=" in line
    }
    lines = (REPOSITORY / "constraints" / "oldest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if "==" in line)

    def numbers(version):
        parts = [int(part) for part in version.split(".")]
        return parts + [0] * (3 - len(parts))

    assert tried.keys() - bounds.keys() == {"pyparsing"}  # of which matplotlib 3.8 needs one of its age
    for name in tried.keys() & bounds.keys():
        assert numbers(bounds[name]) == numbers(tried[name]), name


@pytest.fixture
def source(tmp_path):
    """A copy of the repository: a build leaves files in it."""
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    return shutil.copytree(REPOSITORY, tmp_path / "source", ignore=ignore)


def test_a_wheel_has_the_configuration_the_types_and_the_command(source, tmp_path):
    # Without isolation the build asks nothing of the network.
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in files if name.endswith("entry_points.txt"))

    configs = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "conf").rglob("*.yaml")}
    assert configs
    assert {f"lightning_egeria/{name}" for name in configs} <= files
    sources = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "lightning_egeria").rglob("*.py")}
    assert sources | {"lightning_egeria/py.typed", "lightning_egeria/__init__.pyi"} <= files
    assert "egeria-train = lightning_egeria.cli.train:main" in entry_points
    assert "egeria = lightning_egeria.command:main" in entry_points
    assert not [name for name in files if name.startswith(("tests/", "conf/", "benchmarks/"))]


@pytest.mark.slow
def test_wheel_and_sdist_are_sound_and_the_wheel_runs_elsewhere(source, tmp_path):
    built = tmp_path / "built"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    checked = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    subprocess.run(checked, check=True, capture_output=True)

    def run(*command):
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # An environment of its own, that borrows what the package requires from this one.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (wheel,) = built.glob("*.whl")
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))

    where = run(python, "-c", "import lightning_egeria; print(lightning_egeria.__file__)")
    assert where.startswith(str(environment))
    run(environment / "bin" / "egeria-train", "trainer.max_epochs=1", "run_dir=one", "model.net.depth=8")
    assert "report.html" in run(environment / "bin" / "egeria", "report", "one")
    notebook = json.loads((REPOSITORY / "notebooks" / "2_frozen_prefix_cache.ipynb").read_text())
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code)
    run(python, "notebook.py")
