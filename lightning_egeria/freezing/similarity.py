"""Similarity-preserving (SP) loss between the activations of two models on one batch.

Tung & Mori, "Similarity-Preserving Knowledge Distillation", ICCV 2019, eq. 2-4. The loss needs only a ``B x B`` matrix
per model, so activations stay on their device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROUNDING = 1e-6  # of the entries of a Gram matrix, which are at most 1, in float32


def gram_matrix(activation: Tensor) -> Tensor:
    """Return the similarity of each sample of a batch to each other: ``A A^T`` with rows of unit length.

    Where products would come near the limits of float32, the activation is first scaled to a largest entry of one. This
    does not change the result.

    Args:
        activation: shape ``[B, ...]``, any floating dtype.

    Returns:
        Shape ``[B, B]``, float32. A sample with an activation of zero has a row of zeros.

    >>> gram_matrix(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([[1., 0.],
            [0., 1.]])
    """
    with torch.autocast(activation.device.type, enabled=False):
        activation = activation.detach()
        # The order of the features makes no difference; memory order avoids a copy.
        axes = sorted(range(1, activation.ndim), key=activation.stride, reverse=True)
        rows = activation.permute(0, *axes).flatten(1)
        if not rows.is_cuda:  # on a GPU, reading a value would wait for it
            single = rows.float()
            products = single @ single.T
            lengths = products.diagonal()
            if bool(((lengths > 1e-16) & (lengths < 1e16)).all()):  # they are squared below
                return F.normalize(products, p=2.0, dim=1, eps=torch.finfo(torch.float32).tiny)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # float64 values may exceed float32
        largest = torch.linalg.vector_norm(rows, torch.inf) if rows.numel() else rows.new_ones(())
        rows = (rows / largest.clamp_min(torch.finfo(rows.dtype).tiny)).float()
        # A sample with far smaller activations than the largest may have a row shorter than the default eps.
        return F.normalize(rows @ rows.T, p=2.0, dim=1, eps=torch.finfo(torch.float32).tiny)


def tells_apart(gram: Tensor) -> bool:
    """Whether an activation differs between samples by more than rounding.

    Args:
        gram: shape ``[B, B]``, from `gram_matrix`.

    >>> tells_apart(gram_matrix(torch.tensor([[3.0, 0.0], [0.0, 4.0]])))
    True
    >>> tells_apart(gram_matrix(torch.tensor([[3.0, 4.0], [3.0, 4.0]])))
    False
    """
    return bool((gram.amax(0) - gram.amin(0)).max() > ROUNDING)


def gram_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean squared difference of two Gram matrices, ``||G_1 - G_2||_F^2 / B^2``.

    Args:
        first: shape ``[B, B]``, from `gram_matrix`.
        second: shape ``[B, B]``.

    Returns:
        Scalar, in ``[0, 2 / B]`` for matrices with non-negative entries.
    """
    return (first - second).square().mean()


def similarity_preserving_loss(activation: Tensor, reference: Tensor) -> Tensor:
    """Return the SP loss, ``||G_T - G_R||_F^2 / B^2``, with ``G`` the row-normalised Gram matrix of each activation.

    The loss does not change when an activation is scaled by a positive factor or its feature axis is rotated: it
    compares how similar samples are to one another, not the activations themselves. The value depends on ``B``.

    Args:
        activation: shape ``[B, ...]``.
        reference: shape ``[B, ...]``; the number of features may differ from ``activation``.

    Returns:
        Scalar tensor, float32, without a gradient.

    Raises:
        ValueError: if the batch sizes differ.

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
