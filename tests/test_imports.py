"""Imports point one way: pure core -> engine -> adapters -> application."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_egeria

PACKAGE = Path(lightning_egeria.__file__).parent
# Each file may import files of earlier lines only.
ORDER = [
    ["errors", "bars", "tracing", "compilation", "clock", "freezing", "caching"],
    ["boundaries", "calls", "freezing.sharded", "caching.samples", "caching.store"],
    ["layers", "report.savings", "report.record", "freezing.similarity", "freezing.plasticity"],
    ["report.drawing"],
    ["report"],
    [
        "freezing.policy",
        "freezing.recording",
        "freezing.learners",
        "freezing.limits",
        "freezing.parcels",
        "freezing.int8",
        "freezing.metric",
        "freezing.ranks",
        "freezing.strategies",
    ],
    ["freezing.slopes", "freezing.first_step", "freezing.costs", "freezing.precision", "freezing.workers"],
    ["freezing.reference"],
    ["freezing.capture", "freezing.pool"],
    ["freezing.evaluations"],
    ["freezing.engine"],
    ["freezing.display", "freezing.summary"],
    ["freezing.callback"],
    [
        "caching.bypass",
        "caching.background",
        "caching.findings",
        "caching.directory",
        "caching.arguments",
        "caching.hooks",
    ],
    ["caching.loading", "caching.made"],
    ["caching.levels"],
    ["caching.watch", "caching.proof", "caching.planned", "caching.terms", "caching.weights", "caching.command"],
    ["caching.steps"],
    ["caching.stats", "caching.examination", "caching.planning"],
    ["caching.recording", "caching.receiving"],
    ["caching.opening"],
    ["caching.engine"],
    ["caching.datamodule"],
    ["report.recorder", "report.page"],
    ["report.command"],
    [""],
    ["demos", "demos.images", "demos.mobilenet", "demos.resnet", "demos.schedules"],
    ["demos.classifier", "demos.data"],
    ["demos.segmentation", "demos.squad", "demos.translation"],
    ["demos.question_answering"],
    ["demos.masked_language"],
    ["configuration"],
    ["train"],
]
PLACE = {name: place for place, names in enumerate(ORDER) for name in names}
ADAPTERS = {
    "bars",
    "freezing.callback",
    "freezing.display",
    "freezing.strategies",
    "demos.schedules",
    "demos.classifier",
    "demos.data",
    "demos.segmentation",
    "demos.translation",
    "caching.datamodule",
    "report.recorder",
    "train",
}


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module


def test_every_file_has_its_place():
    assert set(FILES) == set(PLACE)


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_point_one_way(name):
    for module in imports(FILES[name]):
        if module == "lightning_egeria" or module.startswith("lightning_egeria."):
            imported = module.removeprefix("lightning_egeria").removeprefix(".")
            assert PLACE[imported] < PLACE[name], f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(FILES))
def test_frameworks_stay_in_the_adapters(name):
    roots = {module.split(".")[0] for module in imports(FILES[name])}
    assert "lightning" not in roots or name in ADAPTERS
    assert not roots & {"hydra", "omegaconf"} or name in ("configuration", "train")


@pytest.mark.parametrize("name", sorted(FILES))
def test_freezing_and_caching_do_not_know_each_other(name):
    room = name.split(".")[0]
    other = {"freezing": "caching", "caching": "freezing"}.get(room)
    assert other is None or not any(module.startswith(f"lightning_egeria.{other}") for module in imports(FILES[name]))


def test_the_public_names():
    assert sorted(lightning_egeria.__all__) == [
        "FreezingPolicy",
        "FrozenPrefixCache",
        "KnowledgeGuidedFreezing",
        "LayerChain",
        "RunRecorder",
        "ScriptedPolicy",
        "SimilarityPreservingLoss",
        "SlopePolicy",
        "similarity_preserving_loss",
    ]
    assert all(hasattr(lightning_egeria, name) for name in lightning_egeria.__all__)


def test_a_worker_imports_neither_lightning_nor_torchmetrics():
    """They take longer to import than torch, and each worker would."""
    program = (
        "import sys, lightning_egeria.freezing.workers, lightning_egeria.freezing.reference;"
        "sys.exit(any(name in sys.modules for name in ('lightning', 'torchmetrics')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)
