"""The Lotka-Volterra flow, its discrete map, theorem 6, switch-on times and losses."""

import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse
from scipy.integrate import solve_ivp

from nqflib import lotka_volterra as lv


def gaussian_problem(seed, modes=6, samples=9):
    """Eigenvalues (m, K), targets (m,), rates and competition of random commuting structure matrices."""
    generator = np.random.default_rng(seed)
    eigenvalues = generator.standard_normal((samples, modes))
    targets = eigenvalues @ generator.uniform(0.2, 1, modes)
    return eigenvalues, targets, *lv.rates_and_competition(eigenvalues, targets)


def figure_3(seed=0):
    """Structure matrices (5, 5, 5) with C = I and r = 2^-k, targets, rates."""
    rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((5, 5)))[0]
    eigenvalues = np.sqrt(5 / 8) * rotation
    rates = 2.0 ** -np.arange(5)
    return eigenvalues, eigenvalues @ rates, rates


def plain_flow(rates, competition, abundance, times):
    """The flow in z itself by an explicit method of order 8 with a tolerance near rounding."""
    start = np.broadcast_to(abundance, rates.shape).astype(float)
    solution = solve_ivp(
        lambda _, z: z * (rates - competition @ z), (0, times[-1]), start, "DOP853", times, rtol=1e-13, atol=1e-40
    )
    return solution.y.T


def test_theory_modules_do_not_import_torch():
    names = ("lotka_volterra", "closed_forms", "staircase", "power_laws")
    code = "import sys\n" + "\n".join(f"import nqflib.{name}" for name in names) + "\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------ coefficients


def test_rates_and_competition_are_those_of_the_gradient_flow_on_the_weights():
    generator = np.random.default_rng(0)
    eigenvalues, targets, rates, competition = gaussian_problem(0)
    basis = np.linalg.qr(generator.standard_normal((6, 6)))[0]
    matrices = np.einsum("ik,mk,jk->mij", basis, eigenvalues, basis)
    weights = generator.standard_normal((6, 3))
    moment = weights @ weights.T
    errors = np.einsum("ij,mij->m", moment, matrices) - targets
    gradient = 4 / len(targets) * np.einsum("m,mij->ij", errors, matrices) @ weights  # of the mean-square loss
    speed = basis.T @ (-gradient @ weights.T - weights @ gradient.T) @ basis
    abundance = np.diag(basis.T @ moment @ basis)
    np.testing.assert_allclose(speed.diagonal(), abundance * (rates - competition @ abundance), rtol=1e-12)


def test_the_gradient_above_is_that_of_the_mean_square_loss():
    eigenvalues, targets, rates, competition = gaussian_problem(1)

    def loss(z):
        return np.mean((eigenvalues @ z - targets) ** 2)

    z, step = np.full(6, 0.3), 1e-6
    slopes = [(loss(z + step * e) - loss(z - step * e)) / (2 * step) for e in np.eye(6)]
    np.testing.assert_allclose(slopes, (competition @ z - rates) / 4, rtol=1e-7)


# ----------------------------------------------------------------------------------------- flow


def test_dense_flow_agrees_with_a_plain_solver_of_order_8():
    *_, rates, competition = gaussian_problem(2)
    times = np.linspace(0, 20, 41)
    trajectory = lv.flow(rates, competition, 1e-4, times)
    assert np.abs(trajectory.abundances - plain_flow(rates, competition, 1e-4, times)).max() < 3e-8


def test_flow_with_an_asymmetric_competition_agrees_with_a_plain_solver():
    *_, rates, competition = gaussian_problem(3)
    competition = competition + np.triu(np.full((6, 6), 0.2), 1)
    times = np.linspace(0, 10, 21)
    trajectory = lv.flow(rates, competition, 1e-3, times)
    assert np.abs(trajectory.abundances - plain_flow(rates, competition, 1e-3, times)).max() < 3e-8


@pytest.mark.parametrize("abundance", [1e-4, 1e-30, 1e-300])
def test_dense_and_sparse_flow_agree_with_the_closed_form_at_any_abundance(abundance):
    rates, diagonal = np.array([1.0, 0.5, 0.25, -0.1]), np.array([1.0, 2.0, 1.0, 1.0])
    times = np.linspace(0, 6 * np.log(1 / abundance), 40)
    exact = lv.flow(rates, diagonal, abundance, times)
    assert exact.evaluations == 0
    for competition in (np.diag(diagonal), sparse.diags_array(diagonal)):
        solved = lv.flow(rates, competition, abundance, times)
        assert np.abs(solved.abundances - exact.abundances).max() < 5e-8
        assert np.abs(solved.log_abundances - exact.log_abundances).max() < 1e-6


def test_sparse_and_dense_competition_give_one_flow():
    generator = np.random.default_rng(4)
    dense = np.diag(generator.uniform(1, 2, 30)) + 0.3 * (np.eye(30, k=1) + np.eye(30, k=-1))
    rates = generator.uniform(0.2, 1, 30)
    times = np.linspace(0, 300, 20)
    by_lsoda = lv.flow(rates, dense, 1e-30, times).abundances
    by_radau = lv.flow(rates, sparse.csr_array(dense), 1e-30, times).abundances
    assert np.abs(by_lsoda - by_radau).max() < 1e-7


def test_a_smaller_tolerance_brings_a_smaller_error():
    *_, rates, competition = gaussian_problem(5)
    times = np.linspace(0, 60, 30)
    exact = lv.flow(rates, competition, 1e-20, times, tolerance=1e-12).abundances
    errors = [
        np.abs(lv.flow(rates, competition, 1e-20, times, tolerance=tol).abundances - exact).max()
        for tol in (1e-5, 1e-8)
    ]
    assert errors[1] < 1e-2 * errors[0]
    assert errors[1] < 1e-6


def test_log_abundances_stay_finite_where_abundances_underflow():
    trajectory = lv.flow([1.0, -1.0], np.array([[1.0, 0.5], [0.5, 1.0]]), 1e-300, [0.0, 2000.0])
    assert trajectory.abundances[-1, 1] == 0
    # ln z_1 falls at the rate 1 alone and, once mode 0 is there at z = 1, at 1.5
    switch = np.log(1e300)
    assert trajectory.log_abundances[-1, 1] == pytest.approx(-switch - 2000 - 0.5 * (2000 - switch), abs=1e-5)


def test_flow_ends_where_every_mode_is_at_rest_or_shrinks():
    *_, rates, competition = gaussian_problem(6, modes=8, samples=12)
    z = lv.flow(rates - 2, competition, 1e-10, [3000.0]).abundances[0]
    growth = rates - 2 - competition @ z
    assert np.abs(z * growth).max() < 1e-6
    assert growth.max() < 1e-6


def test_a_repeated_or_single_time_is_returned_as_asked():
    *_, rates, competition = gaussian_problem(7)
    start = lv.flow(rates, competition, 0.1, [0.0])
    np.testing.assert_allclose(start.abundances, 0.1)
    twice = lv.flow(rates, competition, 0.1, [1.0, 1.0, 2.0]).abundances
    np.testing.assert_array_equal(twice[0], twice[1])
    assert np.abs(twice[2] - plain_flow(rates, competition, 0.1, np.array([0.0, 2.0]))[1]).max() < 1e-7


# -------------------------------------------------------------------------------- gradient descent


def test_the_map_is_full_batch_gradient_descent_on_the_weights():
    eigenvalues, targets, rates = figure_3()
    weights = np.sqrt(1e-5) * np.eye(5)
    for _ in range(3000):
        errors = eigenvalues @ (weights**2).sum(axis=1) - targets
        weights -= 0.01 * 4 / 5 * (errors @ eigenvalues)[:, None] * weights
    mapped = lv.gradient_descent(rates, np.ones(5), 1e-5, 0.01, [0, 3000])
    np.testing.assert_allclose(mapped[1], (weights**2).sum(axis=1), rtol=1e-11)
    np.testing.assert_allclose(mapped[0], 1e-5)


def test_the_map_with_a_matrix_and_with_its_diagonal_agree():
    rates = np.array([1.0, 0.5])
    by_matrix = lv.gradient_descent(rates, np.diag([1.0, 2.0]), 1e-3, 0.1, [50, 100])
    np.testing.assert_allclose(by_matrix, lv.gradient_descent(rates, [1.0, 2.0], 1e-3, 0.1, [50, 100]), rtol=1e-13)


def test_the_map_tends_to_the_flow_at_first_order_in_the_step():
    *_, rates, competition = gaussian_problem(8)
    exact = lv.flow(rates, competition, 1e-3, [2.0]).abundances[0]
    errors = [np.abs(lv.gradient_descent(rates, competition, 1e-3, 2 / n, [n])[0] - exact).max() for n in (2000, 4000)]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.05)


# ------------------------------------------------------------------------------------ theorem 6


def test_theorem_6_solves_the_logistic_equation_for_rates_of_any_sign():
    rates = np.array([1.0, 0.3, 0.0, -0.5, 1e-9, 0.7])
    competition = np.array([1.0, 2.0, 0.5, 1.0, 1.0, 0.1])
    start = np.array([1e-6, 3.0, 0.4, 0.8, 0.2, 7.0])  # the second starts above r/C, the last at it
    times = np.linspace(0, 40, 30)
    exact = plain_flow(rates, np.diag(competition), start, times)
    np.testing.assert_allclose(lv.orthogonal_features(rates, competition, start, times), exact, rtol=2e-11)


def test_theorem_6_with_zero_rate_is_a_hyperbola():
    z = lv.orthogonal_features([0.0], [2.0], 0.5, [0.0, 3.0])
    np.testing.assert_allclose(z[:, 0], [0.5, 0.5 / 4], rtol=1e-15)


def test_theorem_6_keeps_its_digits_from_1e_300_to_saturation():
    times = np.array([0.0, 100.0, 690.0, 1e6])
    z = lv.orthogonal_features([1.0], [1.0], 1e-300, times)[:, 0]
    np.testing.assert_allclose(z[:2], 1e-300 * np.exp(times[:2]), rtol=1e-13)
    np.testing.assert_allclose(z[2], 1 / (1 + np.exp(300 * np.log(10) - 690)), rtol=1e-12)
    assert z[3] == 1


def test_blocks_and_preallocated_output_hold_the_same_numbers():
    generator = np.random.default_rng(9)
    rates, competition = generator.uniform(-0.2, 1, 1000), generator.uniform(0.5, 2, 1000)
    times = np.linspace(0, 30, 7)
    whole = lv.orthogonal_features(rates, competition, 1e-6, times)
    out = np.empty((7, 1000))
    assert lv.orthogonal_features(rates, competition, 1e-6, times, out=out) is out
    np.testing.assert_array_equal(out, whole)
    seen = 0
    for modes, z in lv.orthogonal_features_in_blocks(rates, competition, 1e-6, times, block=128):
        assert modes.start == seen
        np.testing.assert_allclose(z, whole[:, modes], rtol=1e-15)
        seen = modes.stop
    assert seen == 1000


def test_figure_3_gradient_descent_follows_theorem_6():
    *_, rates = figure_3()
    times = 0.01 * np.arange(25_001)
    z = lv.gradient_descent(rates, np.ones(5), 1e-5, 0.01, np.arange(25_001))
    exact = lv.orthogonal_features(rates, np.ones(5), 1e-5, times)
    assert (np.abs(z - exact) / rates).max() < 0.007
    assert (np.abs(z / exact - 1)).max() < 0.025

    half_times = lv.first_crossings(times, z, rates / 2)
    errors = np.abs(half_times / lv.half_saturation_times(rates, np.ones(5), 1e-5) - 1)
    assert errors.max() < 0.0025  # measured .0020, and the claim is .02
    stepwise = lv.half_saturation_times(rates, np.ones(5), 1e-5, learning_rate=0.01)
    assert np.abs(half_times / stepwise - 1).max() < 0.0005


# ------------------------------------------------------------------------------- switch-on times


def test_half_saturation_times_are_those_of_the_closed_form():
    rates, competition, start = np.array([1.0, 0.5]), np.array([2.0, 0.3]), np.array([1e-3, 1e-8])
    exact = lv.half_saturation_times(rates, competition, start, exact=True)
    z = lv.orthogonal_features(rates, competition, start, np.sort(exact))
    np.testing.assert_allclose(z[np.argsort(np.argsort(exact)), [0, 1]], rates / competition / 2, rtol=1e-12)
    papers = lv.half_saturation_times(rates, np.diag(competition), start)
    np.testing.assert_allclose(papers, np.log(rates / (competition * start)) / rates, rtol=1e-15)
    np.testing.assert_allclose(papers, [np.log(500), 2 * np.log(0.5 / 3e-9)], rtol=1e-14)


def test_paper_3_times_are_the_printed_ones():
    rates = 2.0 ** -np.arange(5)
    times = lv.half_saturation_times(rates, np.ones(5), 1e-5)
    np.testing.assert_allclose(times, [11.513, 21.640, 40.507, 75.468, 139.845], atol=6e-4)


def test_half_saturation_of_the_step_tends_to_the_flow_as_the_step_vanishes():
    exact = lv.half_saturation_times([1.0], [1.0], 1e-6, exact=True)
    small = lv.half_saturation_times([1.0], [1.0], 1e-6, learning_rate=1e-9)
    np.testing.assert_allclose(small, exact, rtol=1e-9)


def test_modes_that_do_not_grow_never_switch_on():
    times = lv.half_saturation_times([1.0, 0.0, -1.0], np.ones(3), 1e-3)
    assert np.isinf(times[1:]).all()
    assert np.isinf(lv.leading_switch_on_times([1.0, -1.0], 1e-3)[1])
    assert lv.half_saturation_times([1.0], [1.0], 2.0, exact=True)[0] == -np.inf


def test_leading_switch_on_time_is_the_limit_of_the_half_saturation_time():
    ratios = [
        lv.half_saturation_times([0.5], [4.0], eps, exact=True)[0] / lv.leading_switch_on_times([0.5], eps)[0]
        for eps in (1e-10, 1e-100, 1e-300)
    ]
    errors = np.abs(np.array(ratios) - 1)
    np.testing.assert_allclose(errors[1:], errors[0] * np.array([1 / 10, 1 / 30]), rtol=1e-6)
    # M grows at twice the eigenvalue of Y (theorem 7)
    assert lv.leading_switch_on_times([0.5], 1e-10, factor=2)[0] == pytest.approx(np.log(1e10))


def test_first_crossings_interpolate_and_report_curves_that_stay_below():
    times = np.array([0.0, 1.0, 2.0, 3.0])
    curves = np.array([[0.0, 5.0, 0.0], [1.0, 5.0, 0.1], [3.0, 5.0, 0.2], [2.0, 5.0, 0.3]])
    np.testing.assert_allclose(lv.first_crossings(times, curves, [2.0, 2.0, 2.0]), [1.5, 0.0, np.inf])


# --------------------------------------------------------------------------------------- losses


def test_excess_loss_is_the_mean_square_error_of_the_samples():
    eigenvalues, targets, rates = figure_3(1)
    z = lv.orthogonal_features(rates, np.ones(5), 1e-5, np.linspace(0, 100, 9))
    direct = np.mean((z @ eigenvalues.T - targets) ** 2, axis=1)
    np.testing.assert_allclose(lv.excess_loss(rates, np.ones(5), z), direct, rtol=1e-9, atol=1e-16)
    assert lv.mode_losses(rates, np.ones(5)).sum() == pytest.approx(np.mean(targets**2), rel=1e-12)
    assert lv.mode_losses(rates, np.ones(5)).sum() == pytest.approx(0.16650, abs=1e-5)


# ------------------------------------------------------------------------------------- bad input

GOOD = {"rates": [1.0, 0.5], "competition": np.eye(2), "abundance": 1e-3, "times": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("abundance", 0.0, "abundance must be positive"),
        ("abundance", -1e-3, "abundance must be positive"),
        ("abundance", [1e-3, 1e-3, 1e-3], r"abundance must have shape \(2,\), got \(3,\)"),
        ("abundance", np.nan, "abundance must be finite"),
        ("rates", [-1.0, 0.0], "rates of shape .* must have a positive entry"),
        ("rates", [[1.0, 0.5]], r"rates must have shape \(K,\), got \(1, 2\)"),
        ("rates", [1.0, np.inf], "rates must be finite"),
        ("competition", np.ones((2, 3)), r"competition must have shape \(2, 2\).*got \(2, 3\)"),
        ("competition", np.eye(3), r"competition must have shape \(2, 2\).*got \(3, 3\)"),
        ("competition", np.ones(3), r"competition must have shape \(2, 2\).*got \(3,\)"),
        ("competition", np.full((2, 2), np.nan), "competition must be finite"),
        ("competition", -np.eye(2), "competition must have no negative diagonal entry"),
        ("times", [1.0, 0.5], "times must be nonnegative and increasing"),
        ("times", [-1.0, 0.5], "times must be nonnegative and increasing"),
        ("times", [0.0, np.inf], "times must be a finite vector"),
    ],
)
def test_bad_input_is_refused_by_name(argument, value, message):
    with pytest.raises(ValueError, match=message):
        lv.flow(**(GOOD | {argument: value}))


def test_other_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="tolerance must lie between"):
        lv.flow(**GOOD, tolerance=0)
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        lv.gradient_descent([1.0], [1.0], 1e-3, 0.0, [1])
    with pytest.raises(ValueError, match="whole numbers"):
        lv.gradient_descent([1.0], [1.0], 1e-3, 0.1, [1.5])
    with pytest.raises(ValueError, match="grow without bound"):
        lv.orthogonal_features([1.0], [0.0], 1e-3, [1.0])
    with pytest.raises(ValueError, match=r"out must have shape \(1, 1\)"):
        lv.orthogonal_features([1.0], [1.0], 1e-3, [1.0], out=np.empty((2, 1)))
    with pytest.raises(ValueError, match=r"eigenvalues must be finite of shape \(m, K\)"):
        lv.rates_and_competition([1.0], [1.0])
    with pytest.raises(ValueError, match=r"targets must have shape \(2,\)"):
        lv.rates_and_competition(np.eye(2), [1.0, 2.0, 3.0])
