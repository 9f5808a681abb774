"""Similarity-preserving (SP) loss between the activations of two models on one batch.

Tung & Mori, "Similarity-Preserving Knowledge Distillation", ICCV 2019, eq. 2-4. Only a ``B x B`` matrix per model is
needed, so an activation never has to leave the device it lives on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROUNDING = 1e-6  # of the entries of a Gram matrix, which are at most 1, in float32


def gram_matrix(activation: Tensor) -> Tensor:
    """Similarity of each sample of a batch to each other: ``A A^T`` with rows of unit length.

    Where products would come near the ends of float32, the activation is scaled to a largest entry of one first, which
    leaves the result as it is.

    Args:
        activation: shape ``[B, ...]``, any floating dtype.

    Returns:
        Shape ``[B, B]``, float32. A row of zeros belongs to a sample whose activation is zero.

    >>> gram_matrix(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([[1., 0.],
            [0., 1.]])
    """
    with torch.autocast(activation.device.type, enabled=False):
        activation = activation.detach()
        # In which order the features stand makes no difference; in that of memory they need not be moved.
        axes = sorted(range(1, activation.ndim), key=activation.stride, reverse=True)
        rows = activation.permute(0, *axes).flatten(1)
        if not rows.is_cuda:  # there, looking at a value would wait for it
            single = rows.float()
            products = single @ single.T
            lengths = products.diagonal()
            if bool(((lengths > 1e-25) & (lengths < 1e25)).all()):
                return F.normalize(products, p=2.0, dim=1, eps=torch.finfo(torch.float32).tiny)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # float64 may hold more than float32 can
        largest = torch.linalg.vector_norm(rows, torch.inf) if rows.numel() else rows.new_ones(())
        rows = (rows / largest.clamp_min(torch.finfo(rows.dtype).tiny)).float()
        # Of a sample far quieter than the loudest, a row may be shorter than the default eps.
        return F.normalize(rows @ rows.T, p=2.0, dim=1, eps=torch.finfo(torch.float32).tiny)


def tells_apart(gram: Tensor) -> bool:
    """Whether an activation is another for one sample than for the next, beyond rounding.

    Args:
        gram: shape ``[B, B]``, as `gram_matrix` gives it.

    >>> tells_apart(gram_matrix(torch.tensor([[3.0, 0.0], [0.0, 4.0]])))
    True
    >>> tells_apart(gram_matrix(torch.tensor([[3.0, 4.0], [3.0, 4.0]])))
    False
    """
    return bool((gram.amax(0) - gram.amin(0)).max() > ROUNDING)


def gram_distance(first: Tensor, second: Tensor) -> Tensor:
    """Mean squared difference of two Gram matrices, ``||G_1 - G_2||_F^2 / B^2``.

    Args:
        first: shape ``[B, B]``, as `gram_matrix` gives it.
        second: shape ``[B, B]``.

    Returns:
        Scalar, in ``[0, 2 / B]`` for matrices with non-negative entries.
    """
    return (first - second).square().mean()


def similarity_preserving_loss(activation: Tensor, reference: Tensor) -> Tensor:
    """SP loss, ``||G_T - G_R||_F^2 / B^2`` with ``G`` the row-normalised Gram matrix of each activation.

    It does not change when an activation is scaled by a positive factor or its feature axis is rotated, so it sees what
    a layer says about the samples and not the numbers it says it with. The value depends on ``B``.

    Args:
        activation: shape ``[B, ...]``.
        reference: shape ``[B, ...]``; the features may be of another number than those of ``activation``.

    Returns:
        Scalar tensor, float32. Not differentiable; it measures, it does not train.

    Raises:
        ValueError: the batch sizes differ.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> similarity_preserving_loss(a, 5 * a)
    tensor(0.)
    >>> similarity_preserving_loss(a, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor(0.2929)
    """
    if activation.shape[0] != reference.shape[0]:
        raise ValueError(
            f"activation and reference must hold the same samples, got batches of {activation.shape[0]} and "
            f"{reference.shape[0]}"
        )
    return gram_distance(gram_matrix(activation), gram_matrix(reference))
