"""What is kept, what is tried, and when the cache stops: numbers in, decisions out.

Every threshold of the cache that is not about rounding stands here. The functions know neither torch nor the cache, so
`tests/caching/test_policy.py` tests them with tables.
"""

from __future__ import annotations

import dataclasses

CHEAP_SHARE = 0.1  # of the work behind a value: what takes less from a value that is kept is not kept itself
READ_BYTES_PER_S = 1e9  # with what is copied and checked; a disk may be slower, and is read ahead
READ_ROW_S = 5e-6  # to look up, check and copy a row, however small
SERVE_BATCH_S = 5e-4  # to plan a batch and to record what its step asks for
RECORD_ROW_S = 5e-5  # to digest a sample, and to write its row, however small
RECORD_BYTES_PER_S = 4e8  # of both
SLACK_S = 0.1  # of a whole run: less is not worth a decision, which rests on few and short times
MOST_VALUES = 32  # cached at a time
ASKED_TO_KEEP = 2  # batches that ask for a value that the probe did not see, before it is kept
CALLED_IN_VAIN = 4  # batches that call a frozen module in vain, before it runs as without the cache
PROBES = 10  # batches that may show nothing, before the cache stops
STABLE_BATCHES = 2  # in which a frozen module must stay as it is, before its calls wait for their use
CHANGES_TO_LEAVE = 2  # of the weights of a frozen module, before it runs as without the cache
DIFFERENCES_TO_STOP = 2  # between entries and what the frozen modules compute
CHECK_SHARE = 1 / 40  # of the first rows that came from entries; these are computed again, to compare them
CHECKED_EARLY = 64  # rows; from then on fewer, because what computes them takes long beside what serves them
LATER_CHECK_SHARE = 1 / 400  # of further rows
LEAST_RETURNED = 16  # samples that must be the same again before any is left out
OTHER = 6  # batches in a row that ask for no cached value, or none of their samples, before the cache stops
STRANGE = 20  # batches, before the cache stops because it serves too few samples
LEAST_SERVED = 0.05  # share of the samples with entries
FIRST_SIZES = 8  # batches of samples that come together by chance
MOST_SIZES = 0.5  # sizes of their inputs for each of these
COUNTED = 20  # lazy batches, before it is decided whether inputs are left out
COMPARED_BATCHES = 6  # served and computed, before their times are compared
CLEAR = 1.5  # times as long: then the times of batches decide, without a race of whole steps
RACE_STEPS = 16  # that a race runs without the cache
RACE_SHARE = 0.02  # of the rest of the run, at most
SHORT_RUN = 100  # batches in which a probe of a slow front, and what begins it, take about a fiftieth
PADDED = (
    "batches are padded to their longest sample, and other samples come together in each epoch, so the entries of one "
    "batch do not fit another. Pad all samples to one length"
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What it takes to have a value again for one batch.

    Attributes:
        rows: samples of the batch.
        row_bytes: of the value of a sample.
        seconds: to compute the batch from values that are kept, or from the samples.
        all_seconds: to compute it from the samples.
        from_kept: whether a kept value is behind it.
        sample_bytes: of what a sample is digested from.
        reads: how often each row is read in the rest of the run; None if that is not known.
        batches: of an epoch.
    """

    rows: int
    row_bytes: int
    seconds: float
    all_seconds: float
    from_kept: bool
    sample_bytes: int = 0
    reads: int | None = None
    batches: int = 1


def why_not_keep(costs: Costs, values: int) -> str | None:
    """Return why a value should not be kept; None if it should.

    Args:
        costs: of having the value again.
        values: number of values that are kept.

    >>> why_not_keep(Costs(rows=32, row_bytes=2048, seconds=0.1, all_seconds=0.1, from_kept=False), values=0)
    >>> why_not_keep(Costs(rows=32, row_bytes=2048, seconds=0.002, all_seconds=0.1, from_kept=True), values=1)
    'it is cheap to compute from what is kept'
    """
    if values >= MOST_VALUES:
        return f"{MOST_VALUES} values are kept already"
    if costs.from_kept and costs.seconds < CHEAP_SHARE * costs.all_seconds:
        return "it is cheap to compute from what is kept"
    gain = costs.seconds - read_seconds(costs.rows, costs.row_bytes)
    writing = costs.rows * (RECORD_ROW_S + (costs.row_bytes + costs.sample_bytes) / RECORD_BYTES_PER_S)
    if costs.reads and costs.batches * (writing - costs.reads * gain) <= SLACK_S:
        return None
    if gain < 0:
        return "reading it would take longer than computing it"
    if costs.reads is not None and costs.reads * gain < writing:
        return "it would be read too seldom to make up for writing it"
    return None


def read_seconds(rows: int, row_bytes: int) -> float:
    """Return the seconds that serving rows of a batch takes, as far as it can be told before."""
    return SERVE_BATCH_S + rows * (READ_ROW_S + row_bytes / READ_BYTES_PER_S)


def may_probe(seconds: float, batches: int | None, shuffled: bool) -> bool:
    """Return whether a batch is run twice to see if rows depend on one another.

    In a short run with a slow front, entries are compared in the next epoch instead, in batches of other samples, which
    shows the same and costs nothing.

    Args:
        seconds: that the frozen modules take for the batch.
        batches: of the whole run; None if that is not known.
        shuffled: whether the next epoch has other batches.
    """
    return not shuffled or batches is None or batches >= SHORT_RUN or seconds < 0.05


def checks(served: int, checked: int, size: int) -> bool:
    """Return whether a batch of a size is compared with what the frozen modules compute.

    Args:
        served: rows that came from entries so far.
        checked: rows that were computed again so far.
        size: rows that run, whatever the number of samples to compare.

    >>> checks(served=64, checked=0, size=16), checks(served=640, checked=0, size=16)
    (False, True)
    """
    early = CHECKED_EARLY / CHECK_SHARE
    return checked + size <= CHECK_SHARE * min(served, early) + LATER_CHECK_SHARE * max(0.0, served - early)


def are_many_sizes(batches: int, sizes: int) -> bool:
    """Return whether nearly every batch has inputs of another size, because it is padded to its longest sample.

    Args:
        batches: of samples that come together by chance, so far.
        sizes: how many sizes their inputs had.

    >>> are_many_sizes(8, 6), are_many_sizes(8, 4), are_many_sizes(7, 7), are_many_sizes(30, 8)
    (True, False, False, False)
    """
    return batches >= FIRST_SIZES and sizes > MOST_SIZES * batches


def pays(served: float, computed: float, batches: int | None, rows: int = 1) -> bool | None:
    """Return whether the cache pays by the times of batches; None if whole steps are to be compared.

    Args:
        served: seconds for a sample from entries, loading included.
        computed: seconds for a sample without them.
        batches: that are left of the run; None if that is not known.
        rows: samples of a batch.

    >>> pays(0.001, 0.01, 100), pays(0.009, 0.01, 100), pays(0.009, 0.01, 5000), pays(0.02, 0.01, 100)
    (True, True, None, False)
    """
    if computed >= CLEAR * served:
        return True
    if batches is not None and 0 <= batches * rows * (served - computed) <= SLACK_S:
        return True
    if batches is None or RACE_SHARE * batches > RACE_STEPS:
        return None
    return served < computed
