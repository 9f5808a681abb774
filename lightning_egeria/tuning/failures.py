"""Errors in which a branch may end while training goes on."""

import torch


def is_of_numbers_or_memory(error: Exception) -> bool:
    """Whether a branch has run out of memory, or its numbers are not finite."""
    return _is_out_of_memory(error) or _is_anomaly(error)


def described(error: Exception) -> str:
    """Return what kind of error it is, with the first line of its text.

    >>> described(ValueError("too small")), described(MemoryError())
    ('ValueError: too small', 'out of memory: ')
    """
    kind = "not finite" if _is_anomaly(error) else type(error).__name__
    kind = "out of memory" if _is_out_of_memory(error) else kind
    return f"{kind}: {(str(error).splitlines() or [''])[0]:.200}"


def _is_anomaly(error: Exception) -> bool:
    """Whether this is what ``Trainer(detect_anomaly=True)`` says of numbers that are not finite."""
    text = str(error)
    return text.startswith("Function '") and "returned nan values" in text


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the host, has no memory left: torch raises a kind of its own on devices only."""
    if isinstance(error, MemoryError):
        return True
    kind = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    return isinstance(error, kind) or "can't allocate memory" in str(error) or "out of memory" in str(error)
