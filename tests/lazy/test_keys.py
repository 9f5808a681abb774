"""Numbers of computations."""

from lightning_egeria.caching.record.keys import Keys, Of


def test_keys_are_described_alike_in_each_process():
    first, second = Keys(), Keys()
    second.number(("something else",))
    numbers = [keys.number(("add", Of(keys.number(("row", 0))), 1)) for keys in (first, second)]
    assert numbers[0] != numbers[1]
    assert first.describe(numbers[0]) == second.describe(numbers[1])


def test_equal_parts_have_one_number():
    keys = Keys()
    row = keys.number(("row", 0))
    assert keys.number(("row", 0)) == row
    assert len({row, keys.number(("row", 1)), keys.number(("relu", Of(row))), keys.number(("relu", row))}) == 4
