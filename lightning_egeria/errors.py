"""Every exception of the package. All derive from `EgeriaError`, so one `except` catches them."""


class EgeriaError(Exception):
    """Base class: an error that `lightning_egeria` raised on purpose, with a message meant for the user."""


class ArgumentError(EgeriaError, ValueError):
    """A constructor argument is out of range; the message names it, what was expected and what came."""


class LayerChainError(EgeriaError):
    """No layer chain could be built from the model: unknown names, too few layer modules, nothing to train."""


class TooFewLayersError(LayerChainError):
    """Too few layer modules learn for one of them to freeze; where parameters are held fixed, more may learn later."""


class TrainingDataError(EgeriaError):
    """There is nothing to train on, or it cannot be read as it was described."""


class CheckpointError(EgeriaError):
    """A checkpoint's freezing state does not fit the model or this version of the package."""


class UnsupportedError(EgeriaError):
    """The Trainer is set up in a way that freezing was not made for; the message says what to use instead."""


class DisagreementError(EgeriaError):
    """The processes of one job no longer train the same model."""


class RecordError(EgeriaError):
    """The record of a run cannot be read, or does not hold what is asked for."""


class WorkerError(EgeriaError):
    """A call in a worker process failed: what it ran raised, or the process ended."""


class CacheError(EgeriaError):
    """The network does not do what the cache of its frozen prefix rests on, or the cache directory cannot be used."""
