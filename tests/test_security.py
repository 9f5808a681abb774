"""The page on trust names the tests that hold its promises."""

import ast
import re

from support.leftovers import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def test_each_promise_names_a_test():
    section = PAGE.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert [row for row in rows if "::test_" not in row] == []


def test_each_test_is_there():
    for path, name in NAMED:
        functions = {
            node.name for node in ast.walk(ast.parse((REPOSITORY / path).read_text())) if hasattr(node, "name")
        }
        assert name in functions, f"{path}::{name}"
