"""What entries depend on."""

import dataclasses

import pytest
import torch
from fronts import new_front
from programs.parts import Net

from lightning_egeria.caching.level_set import Origin
from lightning_egeria.stores.rows import RowForm

FORM = RowForm.of(torch.empty(1, 8))


@pytest.fixture
def origin():
    torch.manual_seed(0)
    front = new_front(1, Net().eval())
    yield Origin("training", list, 24, "(x, y)", 2, 7, "", "row 0", 6, front)
    front.end()


def test_manifest_says_what_is_stored(origin):
    manifest = origin.manifest(FORM, 100)
    assert (manifest.entries, manifest.activation_bytes, manifest.field_bytes) == (48, 32, 100)
    assert manifest.about["model"] == "Net"
    assert manifest.about["row"] == "8 torch.float32"


@pytest.mark.parametrize(
    "change",
    [
        {"data": dict},
        {"samples": 25},
        {"structure": "(x, y, z)"},
        {"views": 3},
        {"seed": 8},
        {"run": "1"},
        {"computation": "row 1"},
        {"batch_size": 7},
    ],
    ids=str,
)
def test_another_origin_has_another_store(origin, change):
    other = dataclasses.replace(origin, **change)
    assert other.manifest(FORM, 100).fingerprint != origin.manifest(FORM, 100).fingerprint


def test_other_weights_and_rows_have_another_store(origin):
    before = origin.manifest(FORM, 100).fingerprint
    assert origin.manifest(RowForm.of(torch.empty(1, 9)), 100).fingerprint != before
    with torch.no_grad():
        next(origin.front.prefix.module.parameters()).add_(1)
    origin.front.renew()
    assert origin.manifest(FORM, 100).fingerprint != before


def test_loaders_and_unused_seeds_share_a_store(origin):
    """What is the same in two loaders is stored once."""
    plain = dataclasses.replace(origin, views=0)
    names = {
        dataclasses.replace(plain, **one).manifest(FORM, 100).fingerprint for one in ({}, {"seed": 9}, {"loader": "b"})
    }
    assert len(names) == 1
