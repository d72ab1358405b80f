import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse
from scipy.integrate import solve_ivp

from nqflib import lotka_volterra as lv

FIG3 = np.array([1, 0.5, 0.25, 0.125, 0.0625])


def competing(modes, seed):
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((modes + 4, modes))
    return rng.uniform(0.2, 1, modes), G.T @ G / modes


def brute_force(rates, competition, abundance, times):
    """The same flow in plain z by an explicit method of high order."""
    z0 = np.full(len(rates), abundance)
    solution = solve_ivp(
        lambda _, z: z * (rates - competition @ z), (0, times[-1]), z0, "DOP853", times, rtol=1e-12, atol=1e-300
    )
    return solution.y.T


def test_rates_and_competition_are_those_of_the_gradient_of_the_loss():
    rng = np.random.default_rng(0)
    m, modes = 7, 4
    spectrum, y, W = rng.standard_normal((m, modes)), rng.standard_normal(m), rng.standard_normal((modes, 3))
    r, C = lv.rates_and_competition(spectrum, y)
    z = (W**2).sum(axis=1)
    delta = spectrum @ z - y
    gradient = 4 / m * (spectrum.T @ delta)[:, None] * W  # dL/dW of L = mean delta^2 with A diagonal
    assert 2 * (W * -gradient).sum(axis=1) == pytest.approx(z * (r - C @ z), rel=1e-12)


def test_the_dense_flow_agrees_with_brute_force():
    r, C = competing(8, 1)
    times = np.linspace(0.5, 60, 20)
    z = lv.flow(r, C, 1e-6, times).abundances
    exact = brute_force(r, C, 1e-6, times)
    present = exact > 1e-6
    assert np.abs(z / exact - 1)[present].max() < 1e-6


def test_sparse_dense_and_diagonal_couplings_agree():
    r = np.random.default_rng(2).uniform(0.2, 1, 6)
    c = np.linspace(1, 2, 6)
    times = np.linspace(1, 40, 9)
    closed = lv.flow(r, c, 1e-5, times).abundances
    for matrix in (np.diag(c), sparse.csr_array(np.diag(c))):
        assert lv.flow(r, matrix, 1e-5, times).abundances == pytest.approx(closed, rel=1e-6)
    r, C = competing(6, 3)
    dense = lv.flow(r, C, 1e-5, times).log_abundances
    assert lv.flow(r, sparse.csr_array(C), 1e-5, times).log_abundances == pytest.approx(dense, abs=1e-5)


def test_the_flow_keeps_the_logarithms_of_abundances_far_below_the_smallest_float():
    r, C = np.array([1.0, 0.8]), np.array([[1.0, 0.9], [0.9, 1.0]])
    x = lv.flow(r, C, 1e-300, [1000.0]).log_abundances[0]
    # Mode 1 is pushed down at r_1 - C_10 r_0/C_00 = -0.1 once mode 0 has grown at t = 690.8.
    assert x[0] == pytest.approx(0, abs=1e-6)
    assert x[1] == pytest.approx(np.log(1e-300) + 0.8 * 690.78 - 0.1 * (1000 - 690.78), abs=2)


@pytest.mark.parametrize("rate", [0.7, 0.0, -0.4])
def test_theorem_6_solves_the_logistic_equation(rate):
    times = np.linspace(0, 40, 9)
    z = lv.orthogonal_features([rate], [1.3], [1e-3], times)
    exact = brute_force(np.array([rate]), np.array([[1.3]]), 1e-3, times)
    assert z == pytest.approx(exact, rel=1e-9)


def test_theorem_6_does_not_overflow_at_late_times():
    z = lv.orthogonal_features([3.0, -3.0], [1.0, 1.0], 1e-30, [0.0, 1e6])
    assert z[1] == pytest.approx([3.0, 0.0], abs=1e-12)


def test_gradient_descent_on_the_weights_is_the_map_of_the_abundances():
    rng = np.random.default_rng(4)
    m, modes, eta = 5, 5, 0.01
    Q = np.linalg.qr(rng.standard_normal((modes, modes)))[0]
    spectrum = np.sqrt(m / 8) * Q
    y = spectrum @ FIG3
    W = np.sqrt(1e-3) * np.linalg.qr(rng.standard_normal((modes, modes)))[0]
    z0 = (W**2).sum(axis=1)
    for _ in range(3000):
        delta = spectrum @ (W**2).sum(axis=1) - y
        W = W - eta * 4 / m * (spectrum.T @ delta)[:, None] * W
    r, C = lv.rates_and_competition(spectrum, y)
    mapped = lv.gradient_descent(r, C, z0, eta, [3000])[0]
    assert mapped == pytest.approx((W**2).sum(axis=1), rel=1e-11)


def test_switch_on_times_of_figure_3_agree_with_gradient_descent():
    eta, steps = 0.01, np.arange(0, 20_001, 4)
    z = lv.gradient_descent(FIG3, np.ones(5), 1e-5, eta, steps)
    measured = lv.first_crossings(eta * steps, z, FIG3 / 2)
    assert measured == pytest.approx(lv.half_saturation_times(FIG3, np.ones(5), 1e-5), rel=0.004)
    discrete = lv.half_saturation_times(FIG3, np.ones(5), 1e-5, learning_rate=eta)
    assert np.abs(measured - discrete).max() < 0.01  # the map's own prediction, to the order of one step
    assert lv.half_saturation_times(FIG3, np.ones(5), 1e-5) == pytest.approx(
        [11.513, 21.640, 40.507, 75.468, 139.845], abs=1e-3
    )


def test_exact_half_saturation_times_are_those_of_theorem_6():
    times = lv.half_saturation_times(FIG3, [2.0] * 5, 1e-5, exact=True)
    z = lv.orthogonal_features(FIG3, [2.0] * 5, 1e-5, times)
    assert np.diag(z) == pytest.approx(FIG3 / 4, rel=1e-12)


def test_leading_switch_on_times_become_exact_as_the_abundance_vanishes():
    errors = []
    for eps in (1e-10, 1e-100):
        exact = lv.half_saturation_times(FIG3, np.ones(5) * 0.3, eps)
        errors.append(np.abs(lv.leading_switch_on_times(FIG3, eps) / exact - 1).max())
    assert errors[1] < errors[0] / 9
    assert np.isinf(lv.leading_switch_on_times([1.0, -1.0], 1e-3)[1])


def test_the_excess_loss_is_the_loss_above_its_floor():
    rng = np.random.default_rng(5)
    m = 6
    Q = np.linalg.qr(rng.standard_normal((m, m)))[0][:, :4]
    c = np.array([1.0, 2.0, 0.5, 1.5])
    spectrum = np.sqrt(m * c / 8) * Q
    y = rng.standard_normal(m)
    r, C = lv.rates_and_competition(spectrum, y)
    z = rng.uniform(0, 1, (3, 4))
    loss = np.mean((z @ spectrum.T - y) ** 2, axis=1)
    floor = np.mean((spectrum @ (r / c) - y) ** 2)
    assert lv.excess_loss(r, np.diag(C), z) == pytest.approx(loss - floor, rel=1e-10)
    assert lv.mode_losses(r, np.diag(C)).sum() == pytest.approx(np.mean(y**2) - floor)


def test_a_crossing_is_interpolated_and_infinite_if_it_never_comes():
    crossed = lv.first_crossings([0, 1, 2], [[0.0, 0.0], [1.0, 0.1], [3.0, 0.2]], [2.0, 0.5])
    assert crossed[0] == pytest.approx(1.5)
    assert np.isinf(crossed[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lv.flow([1.0], [[1.0]], -1e-3, [1.0]), "abundance"),
        (lambda: lv.flow([1.0], [[1.0]], 0.0, [1.0]), "abundance"),
        (lambda: lv.flow([-1.0, 0.0], np.eye(2), 1e-3, [1.0]), "rates"),
        (lambda: lv.flow([1.0, 2.0], np.ones((2, 3)), 1e-3, [1.0]), r"competition.*\(2, 2\)"),
        (lambda: lv.flow([1.0, np.nan], np.eye(2), 1e-3, [1.0]), "rates"),
        (lambda: lv.flow([1.0], [[1.0]], 1e-3, [2.0, 1.0]), "times"),
        (lambda: lv.gradient_descent([1.0], [1.0], 1e-3, -0.1, [1]), "learning_rate must be positive"),
        (lambda: lv.gradient_descent([1.0], [1.0], 1e-3, 0.1, [1.5]), "whole numbers"),
        (lambda: lv.rates_and_competition([1.0], [1.0]), r"eigenvalues must be finite of shape \(m, K\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_module_works_without_torch():
    code = "import nqflib.lotka_volterra, nqflib.power_laws, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
