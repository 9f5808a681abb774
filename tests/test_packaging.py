"""What is installed is what is in the repository: the packages, the configuration, the command."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def test_setup_cfg_lists_every_package(setup_cfg):
    listed = set(setup_cfg["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in (REPOSITORY / "lightning_egeria").rglob("__init__.py")
    }
    assert listed == found | {"lightning_egeria.conf"}


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

    for name, version in tried.items():
        assert numbers(bounds[name]) == numbers(version), name


def test_a_wheel_has_the_configuration_the_types_and_the_command(tmp_path):
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(REPOSITORY, source, ignore=ignore)
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
    assert sources | {"lightning_egeria/py.typed"} <= files
    assert "egeria-train = lightning_egeria.train:main" in entry_points
    assert "egeria-cache = lightning_egeria.caching.command:main" in entry_points
    assert not [name for name in files if name.startswith(("tests/", "conf/", "benchmarks/"))]
