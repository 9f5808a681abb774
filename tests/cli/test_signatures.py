"""Whether a value of a configuration fits an argument, and what was probably meant."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from lightning_egeria.cli.signatures import check_value, line_of, parameters_of
from lightning_egeria.errors import ArgumentError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, int),
        (3, float),
        (1, bool),
        ("text", str),
        ("folder", Path),
        ("bf16", Literal["bf16", "int8"]),
        ([1, 2], list[int]),
        (3, int | str),
        ("x", int | str),
        (None, int),
        ({"_target_": "a.B"}, int),
        ({"_target_": "a.b", "_partial_": True}, Callable[[int], int]),
        ("anything", "an annotation that cannot be read"),
    ],
)
def test_what_fits(value, expected):
    check_value("key", value, expected, "a.B")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", int),
        (1.5, int),
        ("x", float),
        ("yes", bool),
        (3, str),
        ("int4", Literal["bf16", "int8"]),
        (["a"], list[int]),
        (1.5, int | str),
        ("a.b", Callable[[int], int]),
    ],
)
def test_what_does_not_fit(value, expected):
    with pytest.raises(ArgumentError, match=r"^key: a\.B expects .*, got "):
        check_value("key", value, expected, "a.B")


def test_parameters_of_a_class():
    parameters, open_ended = parameters_of("lightning_egeria.FreezingPolicy")
    assert parameters["tolerance"].annotation is float
    assert not open_ended


def test_a_function_that_takes_any_other_arguments():
    parameters, open_ended = parameters_of("timm.create_model")
    assert "model_name" in parameters
    assert open_ended


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lightning_egeria.FrezingPolicy", "Did you mean 'lightning_egeria.FreezingPolicy'?"),
        ("lightning_egeria.nowhere.Policy", "No module named 'lightning_egeria.nowhere'"),
    ],
)
def test_a_target_that_is_not_there(target, words):
    with pytest.raises(ArgumentError, match=r"^key: cannot find") as error:
        parameters_of(target, "key")
    assert words in str(error.value)


def test_a_message_is_one_line():
    assert line_of(ValueError("one\n  two")) == "one two"
