import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.core.programs.descriptions import LARGEST_BYTES, MOST_MISTAKES
from lightning_egeria.errors import DescriptionError
from lightning_egeria.jobs.rules import read_description

GOOD = "name: a\nentry: {command: [python, train.py]}\n"


def mistakes(tmp_path, text, *overrides):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(DescriptionError) as caught:
        read_description(path, overrides)
    return str(caught.value).splitlines()


def test_every_mistake_has_its_line_and_near_match(tmp_path):
    found = mistakes(
        tmp_path,
        "name: a b\nentry:\n  comand: x\n"
        "resources:\n  devces: 2\n  nodes: two\n  time: 1:30\n"
        "retries: -1\nretries: 2\n",
    )
    assert found == [
        "job.yaml:1: name: expected letters, digits, . _ -, got 'a b'",
        "job.yaml:3: entry.comand: no such key. Did you mean 'entry.command'?",
        "job.yaml:5: resources.devces: no such key. Did you mean 'resources.devices'?",
        "job.yaml:6: resources.nodes: expected a whole number, got 'two'",
        "job.yaml:7: resources.time: expected longest time of one attempt, as in 90m or 2h, got '1:30'",
        "job.yaml:8: retries: must be at least 0, got -1",
        "job.yaml:9: retries: stands here twice, first in job.yaml:8. Keep one",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: a\nentry: !!python/object/apply:os.system [x]\n",
            "job.yaml:2: the tag tag:yaml.org,2002:python/object",
        ),
        ("name: !x a\n", "job.yaml:1: the tag !x is not allowed"),
        ("a: &x [1]\nb: *x\n", "job.yaml:1: anchors and aliases are not allowed"),
        ("name: [\n", "job.yaml:2: not YAML"),
        ("", "expected keys such as name and entry, got an empty file"),
        ("- a\n", "job.yaml:1: expected keys such as name and entry, got a list"),
        ("name: a\n", "job.yaml:1: entry: is missing: what runs"),
        ("name: ~\nentry: {command: x}\n", "job.yaml:1: name: has no value"),
        (GOOD + "data: {A b: {path: x}}\n", "job.yaml:3: data: 'A b' is no name"),
        (GOOD + "environment: {variables: {EGERIA_X: 1}}\n", "'EGERIA_X' is no name that can stand here"),
        (GOOD + "environment: {secrets: TOKEN}\n", "expected a list, got 'TOKEN'"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deep"),
    ],
)
def test_what_a_file_may_not_hold(text, expected, tmp_path):
    assert expected in "\n".join(mistakes(tmp_path, text))


def test_texts_stay_as_they_stand(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + 'environment:\n  variables: {A: 1e-3, B: no, C: "two\\nlines", D: 012}\n')
    variables = read_description(path).content.environment.variables
    assert variables == {"A": "1e-3", "B": "no", "C": "two\nlines", "D": "012"}


def test_keys_on_the_command_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    job = read_description(path, ["resources.devices=2", "optimisations=none", "name=b"]).content
    assert (job.resources.devices, job.optimisations, job.name) == (2, "none", "b")
    assert "resources.device=2: resources.device: no such key" in mistakes(tmp_path, GOOD, "resources.device=2")[0]
    assert mistakes(tmp_path, GOOD, "x") == ["cannot read 'x' as a setting. Write key=value, as in resources.devices=2"]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DescriptionError, match="cannot read it"):
        read_description(tmp_path / "missing.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(DescriptionError, match="larger than"):
        read_description(large)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\x00")
    with pytest.raises(DescriptionError, match="cannot read it"):
        read_description(binary)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "entry", "command", "data", "x"]), inner, max_size=3)
    ),
)


@settings(max_examples=40)
@given(_JSON)
def test_nothing_but_a_description_error(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(content))
        with contextlib.suppress(DescriptionError):
            read_description(path)


@pytest.mark.parametrize("part", [pytest.param(one, marks=pytest.mark.slow) for one in ("x,", "[],", "''")] + ["{},"])
def test_the_largest_description_takes_seconds(part, tmp_path):
    text = f"name: a\nentry: {{command: [{part * ((LARGEST_BYTES - 100) // len(part))}]}}\n"
    assert len(text) < LARGEST_BYTES
    (tmp_path / "job.yaml").write_text(text)
    began = time.process_time()
    with contextlib.suppress(DescriptionError):
        read_description(tmp_path / "job.yaml")
    assert time.process_time() - began < 30


def test_of_very_many_mistakes_the_first_are_told(tmp_path):
    found = mistakes(tmp_path, GOOD + "".join(f"key{number}: 1\n" for number in range(5000)))
    assert len(found) == MOST_MISTAKES + 1
    assert found[-1] == f"and {5000 - MOST_MISTAKES} more"
