"""Every exception of the package. All derive from `EgeriaError`, so one `except` catches them."""

import collections.abc
import difflib


class EgeriaError(Exception):
    """Base class of all errors that `lightning_egeria` raises on purpose, each with a message for the user."""


class ArgumentError(EgeriaError, ValueError):
    """A constructor argument is out of range. The message names it, the range, and the value."""


class LayerChainError(EgeriaError):
    """No layer chain could be found: unknown names, too few layer modules, or nothing to train."""


class TooFewLayersError(LayerChainError):
    """Fewer than two layer modules are trainable; more may become so later."""


class TrainingDataError(EgeriaError):
    """The training data are missing or cannot be read."""


class CheckpointError(EgeriaError):
    """A checkpoint's freezing state does not fit the model or this version of the package."""


class UnsupportedError(EgeriaError):
    """The Trainer uses something that freezing does not support; the message says what to use instead."""


class NothingTrainedError(EgeriaError, RuntimeError):
    """Something was asked for that only a training step brings."""


class ExchangeError(EgeriaError):
    """The ranks of a job could not exchange gradients: one failed or ended early, or a gradient is missing."""


class PerSampleLossError(EgeriaError):
    """The losses of the samples cannot be taken from the training step; the message says what to give instead."""


class RowsError(EgeriaError):
    """A batch cannot be taken apart into samples, or samples of several batches cannot be joined."""


class RecordError(EgeriaError):
    """The record of a run cannot be read, or lacks the requested metric."""


class SnapshotError(EgeriaError):
    """The state of training cannot be kept: it does not fit where it should be written, or cannot be read back."""


class WorkerError(EgeriaError):
    """A call in a worker process failed: the called object raised, or the process ended."""


class CacheError(EgeriaError):
    """The network violates an assumption of the cache, or the cache directory cannot be used."""


class StoreError(EgeriaError):
    """A store of the cache cannot be read or written as it is; the message says why."""


class StoreBusyError(StoreError):
    """Another process is about to delete the store, or does not let go of it."""


class TraceError(EgeriaError):
    """A workload, a trace or a log of the cluster simulator is missing, damaged, or does not reach far enough."""


class SchedulingError(EgeriaError):
    """A cluster policy gave away devices that the cluster does not have, or a job can never run."""


class PlanError(EgeriaError):
    """A graph pipeline cannot be planned: a damaged graph or plan, stages in a circle, or too little memory."""


class ProgramError(EgeriaError):
    """The program of a job cannot be started."""


class JobError(EgeriaError):
    """Base class of what goes wrong between the description of a job and its run. ``layer`` names where."""

    layer = "jobs"


class DescriptionError(JobError):
    """The description of a job has mistakes; the message has each with its line."""

    layer = "schema"


class CompilationError(JobError):
    """A job cannot become a run directory: a file, a lock or a secret is in the way."""

    layer = "compile"


class QueueError(JobError):
    """A job cannot be handed over, found or changed; the message names the back end or the job."""

    layer = "schedule"


class ExecutionError(JobError):
    """A job that was handed over cannot start or continue: its environment, its data, or its run directory."""

    layer = "execute"


class PipelineError(EgeriaError):
    """A graph pipeline ended: one of its ranks failed, or the ranks did not get the same batch."""


def check_integers(least: int, **arguments: object) -> None:
    """Check that arguments are integers of at least ``least``.

    Raises:
        ArgumentError: if one is not; the message names it.

    >>> check_integers(1, patience=4, steps=0)
    Traceback (most recent call last):
    ...
    lightning_egeria.errors.ArgumentError: steps must be an integer of at least 1, got 0
    """
    for name, value in arguments.items():
        if type(value) is not int or value < least:
            raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}")


def first_of(names: list[str]) -> str:
    """Return the first of several names for a message, and how many more there are.

    >>> print(first_of(["net.0"]), "-", first_of(["net.0", "net.1", "net.2"]))
    'net.0' - 'net.0' and 2 more
    """
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def near_match(word: str, options: collections.abc.Collection[str], prefix: str = "") -> str:
    """Return the sentence " Did you mean ...?" with the closest option; empty if none is close.

    >>> near_match("dpeth", ["depth", "width"], "model.net.")
    " Did you mean 'model.net.depth'?"
    """
    near = difflib.get_close_matches(word, options, n=1)
    return f" Did you mean {prefix + near[0]!r}?" if near else ""
