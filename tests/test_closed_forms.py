import numpy as np
import pytest
from scipy.integrate import solve_ivp

from nqflib import closed_forms as cf
from nqflib import lotka_volterra as lv


def matrix_flow(structure, targets, M0, times):
    """dM/dt = -(H M + M H), H = (4/m) sum Delta_mu A_mu, by an explicit method of high order."""
    m, p = len(structure), len(M0)

    def derivative(_, flat):
        M = flat.reshape(p, p)
        delta = np.einsum("mij,ji->m", structure, M) - targets
        H = 4 / m * np.tensordot(delta, structure, 1)
        return -(H @ M + M @ H).ravel()

    solution = solve_ivp(derivative, (0, times[-1]), M0.ravel(), "DOP853", times, rtol=1e-13, atol=1e-15)
    return solution.y.T.reshape(-1, p, p)


def rotated(spectrum, seed):
    P = np.linalg.qr(np.random.default_rng(seed).standard_normal((spectrum.shape[1],) * 2))[0]
    return np.einsum("ik,mk,jk->mij", P, spectrum, P), P


def test_theorem_4_solves_the_flow_of_proportional_samples():
    rng = np.random.default_rng(0)
    spectrum, c, y = np.array([1.0, 0.6, -0.3]), rng.uniform(0.5, 1.5, 4), rng.uniform(0.5, 1, 4)
    structure, P = rotated(np.outer(c, spectrum), 1)
    times = np.linspace(0, 12, 7)
    solution = cf.proportional_samples(spectrum, c, y, 1e-3, times)
    M = matrix_flow(structure, y, 1e-3 * np.eye(3), times)
    exact = np.einsum("ik,tij,jk->tk", P, M, P)
    assert solution.abundances == pytest.approx(exact, rel=1e-8)
    assert solution.residuals == pytest.approx(np.einsum("mij,tji->tm", structure, M) - y, abs=1e-8)


def test_theorem_5_solves_the_flow_of_orthogonal_samples():
    spectrum = np.zeros((3, 6))
    for mu in range(3):
        spectrum[mu, 2 * mu : 2 * mu + 2] = (1.0, 1.5)
    y = np.array([1.5, 1.0, 0.5])
    structure, P = rotated(spectrum, 2)
    times = np.linspace(0, 15, 7)
    solution = cf.orthogonal_samples(spectrum, y, 1e-4, times)
    M = matrix_flow(structure, y, 1e-4 * np.eye(6), times)
    assert solution.abundances == pytest.approx(np.einsum("ik,tij,jk->tk", P, M, P), rel=1e-7)


def test_theorem_5_agrees_with_the_lotka_volterra_flow():
    spectrum = np.array([[1.0, 2.0, 0.0], [0.0, 0.0, 1.5]])
    y, times = np.array([1.0, 0.7]), np.linspace(0, 30, 6)
    r, C = lv.rates_and_competition(spectrum, y)
    flow = lv.flow(r, C, 1e-8, times).log_abundances
    assert np.log(cf.orthogonal_samples(spectrum, y, 1e-8, times).abundances) == pytest.approx(flow, abs=1e-6)


def isotropic_design(p):
    """Structure matrices with (1/m) sum A_ij A_kl = (c/2)(d_ik d_jl + d_il d_jk): a scaled basis of symmetric matrices."""
    basis = []
    for i in range(p):
        for j in range(i, p):
            E = np.zeros((p, p))
            E[i, j] = E[j, i] = 1 if i == j else 1 / np.sqrt(2)
            basis.append(E)
    return np.array(basis)


def test_theorem_7_solves_the_flow_of_an_isotropic_design():
    rng = np.random.default_rng(3)
    p = 4
    structure = isotropic_design(p)
    strength = cf.isotropic_strength(structure)
    assert strength == pytest.approx(1 / len(structure))
    y = rng.standard_normal(len(structure))
    W = 0.05 * rng.standard_normal((p, 6))
    times = np.linspace(0, 12, 50)
    M = cf.isotropic(cf.task_matrix(structure, y), strength, W @ W.T, times)
    assert np.abs(M - matrix_flow(structure, y, W @ W.T, times)).max() < 1e-10


def test_theorem_7_is_finite_and_right_at_times_where_its_exponentials_overflow():
    rng = np.random.default_rng(4)
    Q = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    gamma, c = np.array([2.0, 1.0, 0.0, -1.0]), 0.5
    W = rng.standard_normal((4, 5))
    M = cf.isotropic(Q @ np.diag(gamma) @ Q.T, c, W @ W.T, [1e4])[0]
    limit = Q @ np.diag(np.maximum(gamma, 0) / (4 * c)) @ Q.T  # Y M + M Y = 8 c M^2 on the growing modes
    assert np.isfinite(M).all()
    assert np.abs(M - limit).max() < 1e-3  # the mode of rate 0 decays as 1/(8 c t)


def test_theorem_16_holds_for_orthogonal_features_and_gives_theorem_6():
    rng = np.random.default_rng(5)
    m, modes = 6, 4
    spectrum = np.sqrt(m / 8) * np.linalg.qr(rng.standard_normal((m, modes)))[0]
    y = rng.standard_normal(m)
    structure, P = rotated(spectrum, 6)
    projectors = np.einsum("ik,jk->kij", P, P)
    growth, saturation = cf.projector_coefficients(structure, y, projectors)
    r, C = lv.rates_and_competition(spectrum, y)
    assert 2 * growth == pytest.approx(r, rel=1e-10)
    assert 2 * saturation == pytest.approx(np.diag(C), rel=1e-10)
    times = np.linspace(0, 5, 4)
    expected = lv.orthogonal_features(r, np.diag(C), 1e-3, times)
    assert cf.projector_abundances(growth, saturation, 1e-3, times) == pytest.approx(expected)
    with pytest.raises(ValueError, match="projectors violate"):
        cf.projector_coefficients(structure, y, np.eye(4)[:, :, None] * np.eye(4)[:, None, :])


def test_corollary_4_is_the_two_layer_linear_network_of_saxe():
    tau = np.array([1.0, 0.5])
    U, V = (np.linalg.qr(np.random.default_rng(seed).standard_normal((2, 2)))[0] for seed in (7, 8))
    target = U @ np.diag(tau) @ V.T
    rho0, times, eta = 1e-3, np.array([1.0, 2.0, 3.0, 5.0]), 1e-4
    Z2, Z1 = U * np.sqrt(rho0), V * np.sqrt(rho0)
    measured, step = [], 0
    for time in times:
        while step < round(time / eta):
            error = Z2 @ Z1.T - target  # white inputs: L = |Z2 Z1^T - T|^2, so dL/dZ2 = 2 error Z1
            Z2, Z1 = Z2 - 2 * eta * error @ Z1, Z1 - 2 * eta * error.T @ Z2
            step += 1
        measured.append(np.linalg.svd(Z2 @ Z1.T, compute_uv=False))
    assert cf.two_factor(tau, np.ones(2), rho0, times) == pytest.approx(np.array(measured), rel=5e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cf.orthogonal_samples([[1.0, 1.0], [0.0, 1.0]], [1.0, 1.0], 1e-3, [1.0]), "mode 1 has several"),
        (lambda: cf.proportional_samples([1.0], [0.0], [1.0], 1e-3, [1.0]), "coefficients must not all be zero"),
        (lambda: cf.isotropic(np.array([[0.0, 1.0], [0.0, 0.0]]), 1.0, np.eye(2), [1.0]), "target"),
        (lambda: cf.isotropic(np.eye(2), 0.0, np.eye(2), [1.0]), "strength must be positive"),
        (lambda: cf.isotropic_strength(np.eye(2)[None]), "not isotropic"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
