import dataclasses
import typing

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_egeria.core.programs.arguments import quantity
from lightning_egeria.jobs.schema import Job


def test_it_is_a_structured_config_of_hydra():
    config = OmegaConf.merge(OmegaConf.structured(Job), {"name": "a", "entry": {"command": "x"}, "retries": 2})
    assert (config.retries, config.resources.devices) == (2, 1)
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(config, {"resources": {"devices": "many"}})
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(config, {"resurces": {}})


def test_each_key_says_what_it_means():
    def fields(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield field
            for part in [hints[field.name], *typing.get_args(hints[field.name])]:
                if dataclasses.is_dataclass(part):
                    yield from fields(part)

    assert [field.name for field in fields(Job) if not field.metadata.get("help")] == []


def test_quantities():
    assert [quantity(text) for text in ("5s", "2m", "3h", "1d", "1MB", "2TB")] == [
        5,
        120,
        10800,
        86400,
        10**6,
        2 * 10**12,
    ]
