"""When samples are selected."""

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.selecting.window import Window


@pytest.mark.parametrize(("start", "end"), [(-0.1, 1), (0.5, 0.5), (0.6, 0.5), (0, 1.1), (float("nan"), 1)])
def test_wrong_shares_are_refused(start, end):
    with pytest.raises(ArgumentError, match="start and end must be shares of the run"):
        Window(start, end)


def test_negative_interval_is_refused():
    with pytest.raises(ArgumentError, match="full_every must be an integer of at least 0, got -1"):
        Window(full_every=-1)


def test_first_epoch_is_whole_and_the_end_is_the_end():
    assert not Window().is_open(0, 0.5)
    assert Window().is_open(1, 1.0)
    assert [Window(0.25, 0.75).is_open(1, share) for share in (0.2, 0.25, 0.74, 0.75)] == [False, True, True, False]
    assert [Window(full_every=3).is_full(number) for number in range(4)] == [False, False, True, False]
    assert Window().is_whole_run
    assert not Window(end=0.9).is_whole_run
