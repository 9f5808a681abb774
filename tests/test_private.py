"""What is private to a class is used in its own file only, in the package, the tests and the benchmarks."""

import ast
import collections

import pytest

from support.leftovers import REPOSITORY

FOLDERS = ("lightning_egeria", "tests", "benchmarks", "notebooks")
# Names that classes of torch, Lightning, matplotlib, Rich and Python have too.
OTHERS = {
    *("_buffers", "_config", "_device", "_lock", "_log_hyperparams", "_modules"),
    *("_parameters", "_repr_png_", "_version"),
}


def trees(*folders):
    for folder in folders:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text())


def private_names(tree):
    """The private methods and attributes of the classes of a file."""
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef):
            for node in ast.walk(one):
                if isinstance(node, ast.FunctionDef):
                    yield node.name
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
                    yield node.attr
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield node.target.id


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def reaches(tree, owners):
    """The private names of other files' classes that a file uses."""
    own = set(private_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in owners and node.attr not in own and not is_own(node):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.fixture(scope="module")
def owners():
    found = collections.defaultdict(list)
    for path, tree in trees("lightning_egeria"):
        for name in filter(is_private, private_names(tree)):
            found[name].append(path)
    return found


def test_private_attributes_are_used_in_their_own_file(owners):
    found = {path: [*reaches(tree, owners)] for path, tree in trees(*FOLDERS)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_reach_is_found(owners):
    assert list(reaches(ast.parse("callback.other._decider.depth"), owners)) == ["line 1: callback.other._decider"]
