"""The arguments, each refused with its name, range and value."""

import pytest

from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.partial.arguments import PartialArguments
from lightning_egeria.methods.partial.plans import GivenPlan, TemporalPlan, UniformPlan
from lightning_egeria.methods.partial.weighting import WeightedPlan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"depths": "all"},
            r"depths must be one of \('temporal', 'graded', 'uniform', 'weighted'\) or a list .*, got 'all'",
        ),
        ({"depths": []}, r"a whole number of at least 1 for each rank, got \[\]"),
        ({"depths": [0, 1]}, r"a whole number of at least 1 for each rank, got \[0, 1\]"),
        ({"depths": [1.5]}, r"a whole number of at least 1 for each rank, got \[1.5\]"),
        ({"min_share": 0}, r"min_share must be a share in \(0, 1\], got 0"),
        ({"depths": "uniform", "rotate_every_n_steps": -1}, "rotate_every_n_steps must be a whole .*, got -1"),
        ({"rotate_every_n_steps": 1}, "is for depths='uniform' and lists, got 1 with depths='temporal'"),
        ({"depths": "weighted", "rotate_every_n_steps": 0}, "got 0 with depths='weighted'"),
        ({"exchange": "some"}, r"exchange must be one of \('contributors', 'all'\), got 'some'"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        PartialArguments(**arguments)


def test_a_list_has_one_number_for_each_rank():
    PartialArguments([2, 3]).check_size(2)
    PartialArguments("uniform").check_size(5)
    with pytest.raises(ArgumentError, match=r"a number for each of 3 ranks, got \[2, 3\]"):
        PartialArguments([2, 3]).check_size(3)


def test_each_has_its_plan():
    kinds = {"temporal": TemporalPlan, "uniform": UniformPlan, "weighted": WeightedPlan, (2, 3): GivenPlan}
    for depths, kind in kinds.items():
        assert type(PartialArguments(depths).plan(2, 3)) is kind
    assert PartialArguments("uniform").plan(2, 4).lengths(1, 4) == (4, 2)  # which rotates
    assert PartialArguments("uniform", rotate_every_n_steps=0).plan(2, 4).lengths(1, 4) == (2, 4)
    assert PartialArguments((2, 4)).plan(2, 4).lengths(1, 4) == (2, 4)  # which does not
