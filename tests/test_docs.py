"""The documentation builds, quotes messages that exist, and names every metric."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_egeria

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SOURCES = sorted((ROOT / "lightning_egeria").rglob("*.py"))


@functools.cache
def templates():
    """Every text in the package but docstrings, with ``...`` for each value that is put in."""
    found = set()
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        alone = {node.value for node in nodes if isinstance(node, ast.Expr)}
        found |= {text_of(node) for node in nodes if node not in alone} - {None}
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
    """The messages that the page on troubleshooting quotes: code of more than one word."""
    text = (DOCS / "troubleshooting.md").read_text()
    quoted = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    return [code for code in quoted if " " in code and not code.startswith(("egeria ", "egeria-"))]


@pytest.mark.parametrize("message", explained())
def test_explained_message_exists(message):
    assert any(message in text for text in templates())


def test_every_metric_is_in_the_reference():
    logged = {text for text in templates() if re.fullmatch(r"egeria/\w+", text)}
    assert len(logged) > 5
    page = (DOCS / "metrics.md").read_text()
    assert not {name for name in logged if f"`{name}`" not in page}


@pytest.mark.slow
def test_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    folders = [DOCS, tmp_path / "pages", "--doctree-dir", tmp_path / "trees"]
    built = subprocess.run([*command, *folders], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(DOCS).with_suffix(".html"): tmp_path / "pages" for path in PAGES}
    for name, folder in pages.items():
        page = (folder / name).read_text()
        assert len(page) > 5000
        assert "{include}" not in page
        assert f"lightning_egeria {lightning_egeria.__version__}" in page
    api = (tmp_path / "pages" / "api.html").read_text()
    assert all(f'id="lightning_egeria.{name}"' in api for name in lightning_egeria.__all__)
