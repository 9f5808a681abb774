"""Damaged state is one kind of error, with what is wrong in its message."""

import math

import pytest

from lightning_egeria.core.training.checkpoints import check_version, checkpoint_read, count_of, is_whole, number_of
from lightning_egeria.errors import CheckpointError


@checkpoint_read()
def read(make):
    return make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: {}["depth"], "KeyError: 'depth'"),
        (lambda: int("x"), "ValueError: invalid literal"),
        (lambda: None + 1, "TypeError"),
        (lambda: [].depth, "AttributeError"),
        (lambda: int(math.inf), "OverflowError"),
    ],
)
def test_what_a_damaged_state_raises_is_a_checkpoint_error(make, text):
    with pytest.raises(CheckpointError, match=f"checkpoint is damaged: {text}") as caught:
        read(make)
    assert caught.value.__cause__ is not None


def test_a_whole_state_is_read():
    assert read(lambda: 3) == 3


@pytest.mark.parametrize("error", [RuntimeError, CheckpointError, KeyboardInterrupt])
def test_other_errors_pass(error):
    def fail():
        raise error("mine")

    with pytest.raises(error, match=r"^mine$"):
        read(fail)


@pytest.mark.parametrize("state", [{"version": 2}, {"version": "1"}, {}])
def test_another_version_is_refused(state):
    check_version({"version": 1}, 1, "freezing")
    with pytest.raises(CheckpointError, match=r"holds freezing state of version .*, expected version 1\. Leave out"):
        check_version(state, 1, "freezing")


@pytest.mark.parametrize("value", [0, 3, 10**12])
def test_a_count_is_a_whole_number(value):
    assert count_of(value) == value


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "1", [1]])
def test_anything_else_is_no_count(value):
    with pytest.raises(ValueError, match="is not an integer from 0 to inf"):
        count_of(value)


@pytest.mark.parametrize("value", [1, 6])
def test_a_count_has_bounds(value):
    assert count_of(3, least=2, most=5) == 3
    with pytest.raises(ValueError, match="from 2 to 5"):
        count_of(value, least=2, most=5)


@pytest.mark.parametrize("value", [0, -2.5, math.inf])
def test_a_number_is_a_float(value):
    assert number_of(value) == value
    assert type(number_of(value)) is float


def test_nan_is_a_number():
    assert math.isnan(number_of(math.nan))


@pytest.mark.parametrize("value", [None, "1.0", True, [1.0]])
def test_anything_else_is_no_number(value):
    with pytest.raises(ValueError, match="is not a number"):
        number_of(value)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError, match="is not a number") as caught:
        number_of("x" * 10_000)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(("value", "least", "whole"), [(3, 3, True), (2, 3, False), (3.0, 1, False), ("3", 1, False)])
def test_is_whole(value, least, whole):
    assert is_whole(value, least) == whole
