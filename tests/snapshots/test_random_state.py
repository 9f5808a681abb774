"""One guard for all generators that user code draws from."""

import random

import numpy as np
import pytest
import torch

from lightning_egeria.core.snapshots.random_state import RandomState, preserved_random_state

DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "torch, odd count of normals": lambda: torch.randn(3).sum().item(),
    "numpy": lambda: np.random.rand(),
    "numpy, half of a pair of normals": lambda: np.random.randn(),
    "python": lambda: random.random(),
    "python, half of a pair of normals": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_restored_state_draws_the_same_again(name):
    draw = DRAWS[name]
    draw()
    state = RandomState.current()
    first = [draw() for _ in range(5)]
    assert len(set(first)) == 5
    state.restore()
    assert [draw() for _ in range(5)] == first


@pytest.mark.parametrize("name", DRAWS)
def test_states_are_equal_if_nothing_was_drawn(name):
    before = RandomState.current()
    assert before == RandomState.current()
    DRAWS[name]()
    after = RandomState.current()
    assert before != after
    before.restore()
    assert before == RandomState.current() != after


def test_a_state_does_not_follow_the_generators():
    state = RandomState.current()
    copy = RandomState(*state)
    for draw in DRAWS.values():
        draw()
    assert state == copy


@pytest.mark.parametrize("name", DRAWS)
def test_a_preserved_block_leaves_no_trace(name):
    draw = DRAWS[name]
    state = RandomState.current()
    expected = [draw() for _ in range(3)]
    state.restore()
    with preserved_random_state():
        draw()
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)
    assert [draw() for _ in range(3)] == expected


def test_a_block_that_raises_is_preserved_too():
    @preserved_random_state()
    def draw_and_raise():
        torch.rand(1)
        raise ValueError("on the way")

    before = RandomState.current()
    with pytest.raises(ValueError, match="on the way"):
        draw_and_raise()
    assert RandomState.current() == before


def test_blocks_nest():
    with preserved_random_state():
        outer = torch.rand(1)
        with preserved_random_state():
            inner = torch.rand(1)
        assert torch.equal(torch.rand(1), inner)
    assert torch.equal(torch.rand(1), outer)
