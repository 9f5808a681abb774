"""SP loss against a float64 NumPy version that was written from the formula alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.freezing.similarity import gram_distance, gram_matrix, similarity_preserving_loss

property_test = settings(deadline=None, derandomize=True, max_examples=60)


def numpy_gram(activation: torch.Tensor) -> np.ndarray:
    rows = activation.detach().to(torch.float64).numpy().reshape(len(activation), -1)
    gram = rows @ rows.T
    norms = np.sqrt((gram**2).sum(axis=1, keepdims=True))
    return np.divide(gram, norms, out=np.zeros_like(gram), where=norms > 0)


def numpy_loss(activation: torch.Tensor, reference: torch.Tensor) -> float:
    difference = numpy_gram(activation) - numpy_gram(reference)
    return float((difference**2).sum() / len(activation) ** 2)


@st.composite
def activations(draw, count: int = 1):
    """Random activations of one batch size, features of any number, entries of both signs or after a ReLU."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch = draw(st.integers(1, 12))
    made = []
    for _ in range(count):
        features = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        values = torch.randn(batch, *features, generator=generator)
        made.append(values.relu() if draw(st.booleans()) else values)
    return made


def rotation(features: int, seed: int) -> torch.Tensor:
    random = torch.randn(features, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(random).Q


@property_test
@given(activations(count=2))
def test_equals_the_formula(pair):
    assert float(similarity_preserving_loss(*pair)) == pytest.approx(numpy_loss(*pair), rel=1e-3, abs=1e-6)


@property_test
@given(activations())
def test_gram_equals_the_formula(made):
    gram = gram_matrix(made[0])
    assert gram.dtype is torch.float32
    np.testing.assert_allclose(gram.numpy(), numpy_gram(made[0]), atol=1e-5)


@property_test
@given(activations(count=2))
def test_symmetric_and_bounded(pair):
    first, second = pair
    loss = similarity_preserving_loss(first, second)
    assert torch.equal(loss, similarity_preserving_loss(second, first))
    positive = bool((gram_matrix(first) >= 0).all() and (gram_matrix(second) >= 0).all())
    assert 0 <= float(loss) <= (2 if positive else 4) / len(first) + 1e-6


@property_test
@given(activations())
def test_zero_for_equal_activations(made):
    assert float(similarity_preserving_loss(made[0], made[0].clone())) == 0


@pytest.mark.parametrize("exponent", range(-30, 31, 5))
def test_scaling_makes_no_difference(exponent):
    first, second = torch.tensor([[1.541], [-0.2934]]), torch.tensor([[-2.1788], [0.5684]])
    for power in (exponent, exponent / 2):
        loss = similarity_preserving_loss(first * 10.0**power, second)
        assert float(loss) == pytest.approx(float(similarity_preserving_loss(first, second)), rel=1e-3)


@property_test
@given(activations(count=2), st.floats(-35, 35))
def test_invariant_to_positive_scaling(pair, exponent):
    first, second = pair
    scaled = first * 10.0**exponent
    assert float(similarity_preserving_loss(scaled, second)) == pytest.approx(
        float(similarity_preserving_loss(first, second)), rel=1e-3, abs=1e-6
    )


@property_test
@given(activations(count=2), st.integers(0, 2**31))
def test_invariant_to_rotations_of_the_feature_axis(pair, seed):
    first, second = pair
    flat = first.flatten(1)
    rotated = (flat.double() @ rotation(flat.shape[1], seed)).float()
    assert float(similarity_preserving_loss(rotated, second)) == pytest.approx(
        float(similarity_preserving_loss(first, second)), rel=1e-3, abs=1e-6
    )


def test_not_invariant_to_what_the_samples_have_in_common():
    activation = torch.eye(4)
    assert float(similarity_preserving_loss(activation, activation + 1)) > 0.01


@pytest.mark.parametrize("scale", [1e-300, 1e-45, 1e-38, 1e-20, 1e20, 1e38, 1e300])
def test_every_magnitude_that_float64_can_hold(scale):
    first, second = torch.rand(6, 10, dtype=torch.float64), torch.rand(6, 10, dtype=torch.float64)
    assert float(similarity_preserving_loss(first * scale, second)) == pytest.approx(
        numpy_loss(first, second), rel=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 5), (7, 4, 5), (7, 3, 4, 5)])
def test_every_floating_dtype_and_shape(dtype, shape):
    first, second = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    loss = similarity_preserving_loss(first, second)
    assert loss.dtype is torch.float32
    # Computed in float32 from the rounded numbers: no more is lost than the rounding of the input itself.
    assert float(loss) == pytest.approx(numpy_loss(first, second), rel=1e-4)


def test_half_precision_sums_do_not_overflow():
    activation = torch.full((4, 1024), 6e4, dtype=torch.float16) * torch.rand(4, 1024).half()
    reference = torch.rand(4, 1024)
    assert float(similarity_preserving_loss(activation, reference)) == pytest.approx(
        numpy_loss(activation, reference), rel=1e-3
    )


def test_autocast_does_not_lower_the_precision():
    first, second = torch.randn(8, 64), torch.randn(8, 64)
    expected = similarity_preserving_loss(first, second)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(similarity_preserving_loss(first, second), expected)


@pytest.mark.parametrize(("shape", "axes"), [((4, 3, 5, 5), (0, 3, 1, 2)), ((4, 3, 5, 2, 6), (0, 4, 1, 2, 3))])
def test_memory_layout_makes_no_difference_but_the_order_of_sums(shape, axes):
    activation = torch.randn(shape)
    other = activation.permute(axes).contiguous().permute(*(axes.index(axis) for axis in range(len(shape))))
    assert torch.equal(other, activation)
    assert other.stride() != activation.stride()
    torch.testing.assert_close(gram_matrix(other), gram_matrix(activation), rtol=1e-5, atol=1e-6)


def test_a_batch_of_one_says_nothing():
    assert float(similarity_preserving_loss(torch.randn(1, 5), torch.randn(1, 5))) == 0


def test_zero_activations_have_zero_rows():
    activation = torch.randn(4, 6)
    activation[1] = 0
    gram = gram_matrix(activation)
    assert torch.equal(gram[1], torch.zeros(4))
    assert torch.isfinite(gram).all()
    assert torch.equal(gram_matrix(torch.zeros(3, 6)), torch.zeros(3, 3))
    assert float(similarity_preserving_loss(torch.zeros(4, 6), activation)) == pytest.approx(
        numpy_loss(torch.zeros(4, 6), activation), rel=1e-4
    )


@pytest.mark.parametrize("quiet", [1e-3, 1e-6, 1e-7, 1e-8])
def test_a_quiet_sample_has_a_row_of_unit_length_too(quiet):
    gram = gram_matrix(torch.diag(torch.tensor([1.0, 1.0, quiet])))
    np.testing.assert_allclose(gram.numpy(), np.eye(3), atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_activation_gives_nan(bad):
    activation = torch.randn(4, 6)
    activation[2, 3] = bad
    assert torch.isnan(similarity_preserving_loss(activation, torch.randn(4, 6)))


def test_not_differentiable_and_leaves_the_graph_alone():
    activation = torch.randn(4, 6, requires_grad=True)
    before = activation.detach().clone()
    loss = similarity_preserving_loss(activation * 1, torch.randn(4, 6))
    assert not loss.requires_grad
    assert torch.equal(activation, before)


def test_features_may_differ_in_number():
    first, second = torch.randn(5, 3), torch.randn(5, 4, 2)
    assert float(similarity_preserving_loss(first, second)) == pytest.approx(numpy_loss(first, second), rel=1e-4)


def test_different_batches_are_refused():
    with pytest.raises(ValueError, match=r"same samples, got batches of 4 and 5"):
        similarity_preserving_loss(torch.ones(4, 2), torch.ones(5, 2))


def test_distance_of_gram_matrices_is_the_loss():
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    assert torch.equal(
        gram_distance(gram_matrix(first), gram_matrix(second)), similarity_preserving_loss(first, second)
    )
