import argparse

import pytest

from lightning_egeria.core.programs.arguments import LARGEST, whole_number


def test_the_bounds_belong_to_it():
    assert [whole_number(1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert whole_number()(str(LARGEST)) == LARGEST


@pytest.mark.parametrize("text", ["0", "4", "-1", "1.5", "", "x", "9" * 30, "9" * 5000])
def test_others_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"^expected a whole number from 1 to 3, got"):
        whole_number(1, 3)(text)
