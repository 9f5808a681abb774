"""Tables of what is kept, tried and stopped."""

import pytest

from lightning_egeria.caching import policy
from lightning_egeria.caching.policy import Costs


@pytest.fixture(autouse=True)
def _caches_pay():
    """Times are numbers here, so they decide."""


SELDOM = "it would be read too seldom to make up for writing it"


def costs(**known):
    return Costs(**{"rows": 32, "row_bytes": 2048, "seconds": 0.1, "all_seconds": 0.1, "from_kept": False, **known})


@pytest.mark.parametrize(
    ("known", "values", "reason"),
    [
        ({}, 0, None),
        ({}, 31, None),
        ({}, 32, "32 values are kept already"),
        # From another kept value: a tenth of the work behind it decides.
        ({"from_kept": True, "seconds": 0.0099}, 1, "it is cheap to compute from what is kept"),
        ({"from_kept": True, "seconds": 0.0101}, 1, None),
        ({"seconds": 0.0099}, 1, None),  # from the samples, which would have to be loaded
        # 32 rows of 10 MB take 0.32 s at 1 GB/s, and 660 microseconds besides.
        ({"row_bytes": 10**7, "seconds": 0.31}, 0, "reading it would take longer than computing it"),
        ({"row_bytes": 10**7, "seconds": 0.33}, 0, None),
        ({"row_bytes": 0, "seconds": 650e-6}, 0, "reading it would take longer than computing it"),
        ({"row_bytes": 0, "seconds": 670e-6}, 0, None),
        # Writing 32 rows of 1 MB, and digesting samples of 1 MB, takes 0.16 s; each later epoch saves 0.067 s.
        ({"row_bytes": 10**6, "sample_bytes": 10**6, "reads": 2, "batches": 9}, 0, SELDOM),
        ({"row_bytes": 10**6, "sample_bytes": 10**6, "reads": 3}, 0, None),
        ({"row_bytes": 10**6, "sample_bytes": 10**6}, 0, None),
        ({"reads": 0}, 0, SELDOM),
        # A tenth of a second in a whole run is not worth a decision: 9 times 0.66 ms a batch, and 1.6 ms to write it.
        ({"row_bytes": 0, "seconds": 0, "reads": 9, "batches": 13}, 0, None),
        (
            {"row_bytes": 0, "seconds": 0, "reads": 9, "batches": 14},
            0,
            "reading it would take longer than computing it",
        ),
    ],
)
def test_a_value_is_kept_where_that_is_quicker(known, values, reason):
    assert policy.why_not_keep(costs(**known), values) == reason


def test_reading_takes_longer_for_more_rows_and_for_larger_ones():
    batch = policy.read_seconds(0, 4096)
    assert batch == policy.SERVE_BATCH_S
    assert policy.read_seconds(64, 4096) - batch == pytest.approx(2 * (policy.read_seconds(32, 4096) - batch))
    assert policy.read_seconds(32, 8192) > policy.read_seconds(32, 4096)


@pytest.mark.parametrize(
    ("seconds", "batches", "shuffled", "tried"),
    [
        (0.01, 8, True, True),
        (2.0, 8, True, False),  # two seconds of a short run; entries are compared in the next epoch, in other batches
        (2.0, 8, False, True),  # where the next epoch has the same batches, that would show nothing
        (2.0, policy.SHORT_RUN, True, True),
        (2.0, None, True, True),
    ],
)
def test_a_batch_runs_twice_where_that_is_little(seconds, batches, shuffled, tried):
    assert policy.may_probe(seconds, batches, shuffled) is tried


def test_a_fortieth_of_the_first_served_rows_is_computed_again_and_fewer_later():
    served = checked = 0
    for _ in range(1000):
        served += 16
        if policy.checks(served, checked, 16):
            checked += 16
        assert checked <= served / 40
        if served == 64 * 40:
            assert checked == 64
    assert checked == (64 + (16_000 - 64 * 40) // 400) // 16 * 16


@pytest.mark.parametrize(
    ("served", "computed", "batches", "verdict"),
    [
        (1.0, 1.5, 10, True),
        (1.0, 1.5, None, True),
        (1.0, 1.4, 10, True),
        (1.0, 1.0, 10, True),  # nothing is lost
        (1.0, 0.995, 10, True),  # a twentieth of a second in all
        (1.0, 0.98, 10, False),
        (1.0, 0.5, 800, False),
        # 16 steps are a fiftieth of more than 800: whole steps are compared.
        (1.0, 1.4, 801, None),
        (1.0, 0.5, 801, None),
        (1.0, 1.4, None, None),
    ],
)
def test_times_of_batches_decide_where_a_race_would_cost_too_much(served, computed, batches, verdict):
    assert policy.pays(served, computed, batches) is verdict
