"""Room for entries."""

from lightning_egeria.caching.store.limits import Budget


def test_what_is_given_back_can_be_taken_again():
    budget = Budget(10)
    assert budget.take(10) == 10
    assert budget.take(1) == 0
    budget.free += 4
    assert (budget.take(7), budget.free) == (4, 0)
