"""Theorems 4, 5, 7 and 16 and corollary 4, against the gradient flow on the weights."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from nqflib import closed_forms as cf
from nqflib import lotka_volterra as lv


def weight_flow(matrices, targets, weights, times, rtol=1e-12):
    """W(t) (T, p, d) of dW/dt = -(4/m) sum_mu (Tr[W W^T A_mu] - y_mu) A_mu W."""

    def speed(_, flat):
        w = flat.reshape(weights.shape)
        errors = np.einsum("ij,mij->m", w @ w.T, matrices) - targets
        return (-4 / len(targets) * np.einsum("m,mij,jd->id", errors, matrices, w)).ravel()

    solution = solve_ivp(speed, (0, times[-1]), weights.ravel(), "DOP853", times, rtol=rtol, atol=1e-18)
    return solution.y.T.reshape(len(times), *weights.shape)


def random_basis(size, seed):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]


def isotropic_design(size, strength, seed):
    """Structure matrices (p (p + 1)/2, p, p): an orthonormal basis of the symmetric matrices, turned at random."""
    rows, columns = np.triu_indices(size)
    matrices = np.zeros((len(rows), size, size))
    matrices[np.arange(len(rows)), rows, columns] += np.where(rows == columns, 0.5, np.sqrt(0.5))
    matrices = matrices + matrices.transpose(0, 2, 1)
    turned = np.tensordot(random_basis(len(rows), seed), matrices, 1)
    return turned * np.sqrt(strength * len(rows))


# ------------------------------------------------------------------------------ common eigenbasis


def test_commuting_matrices_are_diagonalised_together_even_with_repeated_eigenvalues():
    basis = random_basis(5, 0)
    spectrum = np.array([[1.0, 1, 0, 2, 2], [3.0, 3, 1, 1, 0], [0.0, 1, 0, 0, 0]])
    found = cf.common_eigenbasis(np.einsum("ik,mk,jk->mij", basis, spectrum, basis))
    rebuilt = np.einsum("ik,mk,jk->mij", found.basis, found.eigenvalues, found.basis)
    np.testing.assert_allclose(rebuilt, np.einsum("ik,mk,jk->mij", basis, spectrum, basis), atol=1e-13)
    np.testing.assert_allclose(np.sort(found.eigenvalues.sum(axis=0)), np.sort(spectrum.sum(axis=0)), atol=1e-13)


def test_matrices_that_do_not_commute_have_no_common_eigenbasis():
    with pytest.raises(ValueError, match="no common eigenbasis"):
        cf.common_eigenbasis([[[1.0, 0], [0, -1]], [[0, 1.0], [1, 0]]])


# -------------------------------------------------------------------------------- theorems 4 and 5


def test_theorem_4_is_the_gradient_flow_on_proportional_samples():
    basis, spectrum = random_basis(4, 1), np.array([1.5, 0.7, 0.0, -0.8])
    coefficients, targets = np.array([1.0, -0.5, 2.0]), np.array([1.2, 0.3, 1.5])
    matrices = coefficients[:, None, None] * (basis * spectrum @ basis.T)
    weights = 0.02 * np.random.default_rng(2).standard_normal((4, 3))
    times = np.linspace(0, 6, 25)
    path = weight_flow(matrices, targets, weights, times)
    start = np.diag(basis.T @ weights @ weights.T @ basis)

    solved = cf.proportional_samples(spectrum, coefficients, targets, start, times)
    np.testing.assert_allclose(solved.abundances, ((basis.T @ path) ** 2).sum(axis=2), rtol=1e-8)
    outputs = np.einsum("tij,mij->tm", path @ path.transpose(0, 2, 1), matrices)
    np.testing.assert_allclose(solved.residuals, outputs - targets, atol=1e-9)
    # the weights themselves: W = P exp(-xi Lambda) P^T W(0)
    rebuilt = basis * np.exp(-solved.latents[-1] * spectrum) @ basis.T @ weights
    np.testing.assert_allclose(rebuilt, path[-1], atol=1e-9)


def test_theorem_5_is_the_gradient_flow_on_orthogonal_samples():
    basis = random_basis(6, 3)
    spectrum = np.array([[1.0, 1.5, 2, 0, 0, 0], [0, 0, 0, 1.0, -0.5, 0]])  # the last mode belongs to no sample
    targets = np.array([1.0, 0.6])
    matrices = np.einsum("ik,mk,jk->mij", basis, spectrum, basis)
    weights = 0.05 * np.random.default_rng(4).standard_normal((6, 2))
    times = np.linspace(0, 8, 25)
    path = weight_flow(matrices, targets, weights, times)
    rotated = basis.T @ path
    solved = cf.orthogonal_samples(spectrum, targets, np.diag(basis.T @ weights @ weights.T @ basis), times)
    np.testing.assert_allclose(solved.abundances, (rotated**2).sum(axis=2), rtol=1e-8)
    outputs = np.einsum("tij,mij->tm", path @ path.transpose(0, 2, 1), matrices)
    np.testing.assert_allclose(solved.residuals, outputs - targets, atol=1e-9)


@pytest.mark.parametrize("abundance", [1e-5, 1e-16, 1e-300])
def test_theorem_5_agrees_with_the_lotka_volterra_flow_long_after_saturation(abundance):
    spectrum = np.kron(np.eye(4), [1.0, 1.5, 2.0])
    targets = np.array([2.0, 1.0, 0.5, 0.25])
    times = np.linspace(0, 4 * np.log(1 / abundance), 30)
    solved = cf.orthogonal_samples(spectrum, targets, abundance, times)
    flowed = lv.flow(*lv.rates_and_competition(spectrum, targets), abundance, times)
    assert np.abs(solved.abundances - flowed.abundances).max() < 1e-7
    np.testing.assert_allclose(solved.residuals[-1], 0, atol=1e-9)


def test_theorem_4_with_one_sample_is_theorem_5_with_one_sample():
    times = np.linspace(0, 5, 11)
    fourth = cf.proportional_samples([1.0, 0.5], [2.0], [1.0], 1e-6, times)
    fifth = cf.orthogonal_samples([[2.0, 1.0]], [1.0], 1e-6, times)
    np.testing.assert_allclose(fourth.abundances, fifth.abundances, rtol=1e-8)


# ------------------------------------------------------------------------------------ theorem 7


def test_an_isotropic_design_has_its_strength_and_others_are_refused():
    design = isotropic_design(3, 0.7, 5)
    assert cf.isotropic_strength(design) == pytest.approx(0.7, rel=1e-12)
    with pytest.raises(ValueError, match="not isotropic"):
        cf.isotropic_strength(design[1:])


@pytest.mark.parametrize(("size", "width", "scale"), [(4, 4, 1e-2), (5, 2, 1e-2), (5, 8, 1e-4), (3, 1, 0.5)])
def test_theorem_7_is_the_matrix_flow_at_50_times(size, width, scale):
    generator = np.random.default_rng(size)
    design = isotropic_design(size, 0.3, 6)
    targets = generator.standard_normal(len(design))
    weights = scale * generator.standard_normal((size, width))
    target = cf.task_matrix(design, targets)
    times = np.linspace(0, 8 / np.abs(np.linalg.eigvalsh(target)).max(), 50)
    path = weight_flow(design, targets, weights, times, rtol=1e-13)
    exact = path @ path.transpose(0, 2, 1)
    solved = cf.isotropic(target, 0.3, weights @ weights.T, times)
    assert np.abs(solved - exact).max() < 1e-10 * np.abs(exact).max()
    assert np.abs(solved - exact).max() < 1e-10


def test_theorem_7_is_its_own_printed_formula_where_that_does_not_overflow():
    generator = np.random.default_rng(7)
    target = generator.standard_normal((4, 4))
    target = target + target.T
    weights = 0.1 * generator.standard_normal((4, 4))
    start, c, time = weights @ weights.T, 0.4, 1.3
    values, vectors = np.linalg.eigh(target)
    growth = vectors * np.exp(values * time) @ vectors.T
    phi = vectors * (np.expm1(2 * values * time) / (2 * values)) @ vectors.T
    printed = growth @ start @ np.linalg.inv(np.eye(4) + 8 * c * phi @ start) @ growth
    np.testing.assert_allclose(cf.isotropic(target, c, start, [time])[0], printed, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("time", [1e3, 1e6, 1e12])
def test_theorem_7_tends_to_the_positive_part_of_the_target_without_overflow(time):
    generator = np.random.default_rng(8)
    target = generator.standard_normal((5, 5))
    target = target + target.T
    values, vectors = np.linalg.eigh(target)
    weights = 1e-3 * generator.standard_normal((5, 7))
    limit = vectors * np.maximum(values, 0) @ vectors.T / (4 * 0.3)
    with np.errstate(all="raise", under="ignore"):
        found = cf.isotropic(target, 0.3, weights @ weights.T, [time])[0]
    np.testing.assert_allclose(found, limit, atol=1e-13)


def test_theorem_7_keeps_the_rank_and_so_one_unit_learns_the_strongest_direction_only():
    target = np.diag([2.0, 1.0, -1.0])
    turn = random_basis(3, 9)
    weights = 1e-4 * np.ones((3, 1))
    found = cf.isotropic(turn @ target @ turn.T, 0.25, weights @ weights.T, [1e5])[0]
    np.testing.assert_allclose(turn.T @ found @ turn, np.diag([2.0, 0, 0]), atol=1e-12)


def test_theorem_7_in_the_commuting_case_is_a_logistic_for_abundances_30_orders_apart():
    growth, start = np.array([1.0, 0.5, -0.2, 0.0]), np.array([1e-30, 1e-5, 1e-3, 1e-2])
    times = np.linspace(0, 200, 50)
    found = cf.isotropic(np.diag(growth), 0.25, np.diag(start), times)
    logistic = lv.orthogonal_features(2 * growth, np.full(4, 8 * 0.25), start, times)
    np.testing.assert_allclose(found.diagonal(axis1=1, axis2=2), logistic, rtol=1e-12)


# ----------------------------------------------------------------------- theorem 16 and corollary 4


def test_theorem_16_contains_theorem_6():
    rotation = random_basis(4, 10)
    spectrum = np.sqrt(4 / 8) * rotation
    rates = np.array([1.0, 0.5, 0.25, 0.125])
    matrices = spectrum[:, :, None] * np.eye(4)
    projectors = np.eye(4)[:, :, None] * np.eye(4)
    growth, saturation = cf.projector_coefficients(matrices, spectrum @ rates, projectors)
    np.testing.assert_allclose(growth, rates / 2, atol=1e-14)
    np.testing.assert_allclose(saturation, 0.5, atol=1e-14)
    times = np.linspace(0, 50, 9)
    found = cf.projector_abundances(growth, saturation, 1e-5, times)
    np.testing.assert_allclose(found, lv.orthogonal_features(rates, np.ones(4), 1e-5, times), rtol=1e-12)


def test_theorem_16_contains_the_commuting_case_of_theorem_7():
    design = isotropic_design(3, 0.5, 11)
    targets = np.random.default_rng(12).standard_normal(len(design))
    target = cf.task_matrix(design, targets)
    values, vectors = np.linalg.eigh(target)
    projectors = np.einsum("ia,ja->aij", vectors, vectors)
    growth, saturation = cf.projector_coefficients(design, targets, projectors)
    np.testing.assert_allclose(growth, values, atol=1e-12)
    np.testing.assert_allclose(saturation, 4 * 0.5, rtol=1e-12)
    times = np.linspace(0, 10, 7)
    z = cf.projector_abundances(growth, saturation, 1e-4, times)
    moments = cf.isotropic(target, 0.5, 1e-4 * np.eye(3), times)
    np.testing.assert_allclose(np.einsum("ta,aij->tij", z, projectors), moments, atol=1e-11)


def test_projectors_that_violate_a_condition_are_refused():
    design = isotropic_design(2, 0.5, 13)
    targets = np.array([1.0, 0.2, -0.4])
    with pytest.raises(ValueError, match="Y Pi"):
        cf.projector_coefficients(design, targets, [np.diag([1.0, 0.0])])
    coupled = [np.diag([1.0, 1.0]), np.diag([1.0, -1.0])]
    with pytest.raises(ValueError, match=r"K\(Pi_b\)"):
        cf.projector_coefficients(coupled, [1.0, 0.0], [np.diag([1.0, 0.0]), np.diag([1.0, 1.0])])


def test_corollary_4_is_the_gradient_flow_of_a_two_layer_linear_network():
    generator = np.random.default_rng(14)
    left, right = random_basis(3, 15), random_basis(3, 16)
    strengths, variances = np.array([1.0, 0.6, 0.3]), np.array([1.0, 0.5, 2.0])
    # samples <S, u v^T> of unit products: S over a basis of the 3 x 3 matrices, weighted by the variance along v
    root = right * np.sqrt(9 * variances) @ right.T
    basis_matrices = np.einsum("ai,bj->abij", np.eye(3), np.eye(3)).reshape(9, 3, 3) @ root
    task = left * strengths @ right.T
    wanted = task @ np.linalg.inv(right * variances @ right.T)
    targets = np.einsum("mij,ij->m", basis_matrices, wanted)
    np.testing.assert_allclose(np.einsum("m,mij->ij", targets, basis_matrices) / 9, task, atol=1e-12)
    matrices = np.zeros((9, 6, 6))
    matrices[:, :3, 3:] = basis_matrices / 2
    matrices[:, 3:, :3] = basis_matrices.transpose(0, 2, 1) / 2
    hidden = np.linalg.qr(generator.standard_normal((4, 3)))[0]
    weights = np.sqrt(1e-4) * np.vstack([left @ hidden.T, right @ hidden.T])  # balanced and aligned
    times = np.linspace(0, 8, 20)
    path = weight_flow(matrices, targets, weights, times)
    product = path[:, :3] @ path[:, 3:].transpose(0, 2, 1)
    found = np.einsum("ia,tij,ja->ta", left, product, right)
    np.testing.assert_allclose(cf.two_factor(strengths, variances, 1e-4, times), found, rtol=1e-8)


# ------------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="each mode to one sample; mode 0 has several"):
        cf.orthogonal_samples([[1.0, 0.0], [1.0, 1.0]], [1.0, 1.0], 1e-3, [1.0])
    with pytest.raises(ValueError, match="abundance must be positive"):
        cf.orthogonal_samples([[1.0]], [1.0], 0.0, [1.0])
    with pytest.raises(ValueError, match="coefficients must not all be zero"):
        cf.proportional_samples([1.0], [0.0], [1.0], 1e-3, [1.0])
    with pytest.raises(ValueError, match="strength must be positive"):
        cf.isotropic(np.eye(2), 0.0, np.eye(2), [1.0])
    with pytest.raises(ValueError, match=r"order_parameter must have shape \(2, 2\), got \(3, 3\)"):
        cf.isotropic(np.eye(2), 1.0, np.eye(3), [1.0])
    with pytest.raises(ValueError, match="target must be symmetric"):
        cf.isotropic([[1.0, 1.0], [0.0, 1.0]], 1.0, np.eye(2), [1.0])
    with pytest.raises(ValueError, match="positive semidefinite"):
        cf.isotropic(np.eye(2), 1.0, np.diag([1.0, -1.0]), [1.0])
    with pytest.raises(ValueError, match=r"structure_matrices must be finite of shape \(m, p, p\)"):
        cf.task_matrix(np.eye(2), [1.0, 1.0])
