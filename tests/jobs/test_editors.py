import jsonschema
import pytest

from lightning_egeria.jobs.editors import json_schema

GOOD = {
    "name": "a",
    "entry": {"experiment": "default", "overrides": ["a=1"]},
    "optimisations": {"freezing": True},
    "resources": {"time": "2h", "memory": None},
    "data": {"x": {"path": "/x"}},
    "sweep": {"lr": [0.1, "2"]},
}


def test_it_is_a_schema_and_takes_a_good_job():
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.validate(GOOD, json_schema())


@pytest.mark.parametrize(
    "change",
    [
        {"nam": 1},
        {"resources": {"time": "soon"}},
        {"retries": -1},
        {"queue": {"priority": 10**33}},
        {"optimisations": "some"},
        {"entry": {"command": []}},
        {"optimisations": {"magic": True}},
        {"data": {"A b": {"path": "x"}}},
        {"data": {"a": {}}},
    ],
)
def test_it_refuses_what_the_command_refuses(change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**GOOD, **change}, json_schema())
