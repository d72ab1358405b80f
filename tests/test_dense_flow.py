"""With overlapping modes, whose stiff direction is split off, the flow is that of the full Jacobian."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from nqflib import dense_flow
from nqflib.lotka_volterra import flow, rates_and_competition


def overlapping(modes: int = 150) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    eigenvalues = generator.uniform(0, 1, (2 * modes, modes)) / np.sqrt(modes)
    return rates_and_competition(eigenvalues, eigenvalues @ generator.uniform(0.1, 1, modes))


def outlier(c: np.ndarray):
    return dense_flow._outlier(c, lambda z: c @ z)


def test_overlapping_modes_have_one_large_eigenvalue_and_it_is_found():
    _, c = overlapping()
    found = outlier(c)
    assert found is not None
    values, vectors = np.linalg.eigh(c)
    assert found[1] == pytest.approx(values[-1], rel=1e-10)
    assert abs(found[0] @ vectors[:, -1]) == pytest.approx(1, abs=1e-10)


def test_modes_of_either_sign_have_none():
    lam = np.random.default_rng(0).standard_normal((300, 150))
    assert outlier(lam.T @ lam) is None


@pytest.mark.parametrize("abundance", [1e-4, 1e-30])
def test_both_ways_to_solve_give_one_flow(abundance, monkeypatch):
    r, c = overlapping()
    times = np.linspace(0, 300, 31)
    split = flow(r, c, abundance, times)
    monkeypatch.setattr(dense_flow, "_outlier", lambda *_: None)
    full = flow(r, c, abundance, times, tolerance=1e-12)
    assert np.abs(split.log_abundances - full.log_abundances).max() < 1e-7
    assert split.evaluations != full.evaluations  # they are two ways


def test_overlapping_modes_agree_with_a_plain_solver_of_order_8():
    r, c = overlapping()
    times = np.linspace(0, 100, 11)
    plain = solve_ivp(
        lambda _, x: r - c @ np.exp(x), (0, 100), np.full(r.size, np.log(1e-6)), "DOP853", times, rtol=1e-12, atol=1e-11
    )
    assert np.abs(flow(r, c, 1e-6, times).log_abundances - plain.y.T).max() < 1e-8
