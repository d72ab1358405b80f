"""The loss law's fit against laws that are known, another fit, and repeated noise."""

import numpy as np
import pytest

from nqflib.language_model.loss_law import EXPONENTS, fit_loss_law, fit_with_floor
from nqflib.power_laws import profile_floor

TOKENS = np.linspace(0.2, 1, 24) * 2e6


def law(floor, exponent, drop=0.7):
    return floor + drop * (TOKENS / TOKENS[0]) ** -exponent


@pytest.mark.parametrize(("floor", "exponent"), [(2.5, 1.0), (0.0, 0.15), (1.3, 0.3), (2.6, 2.5)])
def test_an_exact_law_is_found_with_an_interval_of_no_width(floor, exponent):
    fit = fit_loss_law(TOKENS, law(floor, exponent))
    assert fit.exponent == pytest.approx(exponent, rel=1e-4)
    assert fit.floor == pytest.approx(floor, abs=1e-3)
    assert fit.r2 == pytest.approx(1, abs=1e-9)
    assert fit.interval == pytest.approx((exponent, exponent), rel=1e-3)
    assert fit_with_floor(TOKENS, law(floor, exponent), floor).exponent == pytest.approx(exponent, rel=1e-5)


def test_the_unit_of_the_tokens_does_not_matter():
    noisy = law(2.5, 0.8) + 0.003 * np.random.default_rng(0).standard_normal(24)
    first, second = fit_loss_law(TOKENS, noisy), fit_loss_law(TOKENS / 64, noisy)
    assert np.hstack(first) == pytest.approx(np.hstack(second), rel=1e-6)


def test_a_law_without_a_floor_is_not_given_a_negative_one():
    fit = fit_loss_law(TOKENS, 3 - 0.25 * np.log(TOKENS / TOKENS[0]))  # steeper than any power with a floor above zero
    assert fit.floor == 0
    assert fit.exponent == pytest.approx(fit_with_floor(TOKENS, 3 - 0.25 * np.log(TOKENS / TOKENS[0]), 0).exponent)


def test_small_errors_give_what_the_fit_of_the_logarithm_gives():
    noisy = law(2.5, 0.8) * (1 + 3e-4 * np.random.default_rng(1).standard_normal(24))
    fit, peer = fit_loss_law(TOKENS, noisy), profile_floor(TOKENS, noisy)
    assert fit.exponent == pytest.approx(peer.exponent, rel=0.03)
    assert fit.floor == pytest.approx(peer.floor, abs=0.01)
    assert fit.interval == pytest.approx(peer.exponent_interval, rel=0.05)


def test_the_interval_holds_the_exponent_in_nineteen_of_twenty_repetitions():
    random = np.random.default_rng(2)
    held, fewer = 0, 0
    for _ in range(60):
        noisy = law(2.5, 0.8) + 0.002 * random.standard_normal(24)
        low, high = fit_loss_law(TOKENS, noisy).interval
        held += low <= 0.8 <= high
        wide = fit_loss_law(TOKENS, noisy, independent=12).interval
        fewer += wide[0] < low and high < wide[1]
    assert held >= 52
    assert fewer == 60


def test_equivalent_exponents_have_an_r2_just_as_far_below_the_best_as_asked():
    curve = law(2.5, 0.8) + 0.002 * np.random.default_rng(3).standard_normal(24)
    fit = fit_loss_law(TOKENS, curve, tolerance=0.004)
    for gamma in fit.equivalent:
        power = TOKENS**-gamma
        design = np.stack([np.ones(24), power / power.max()], axis=1)
        residual = curve - design @ np.linalg.lstsq(design, curve, rcond=None)[0]
        r2 = 1 - np.sum(residual**2) / np.sum((curve - curve.mean()) ** 2)
        assert fit.r2 - r2 == pytest.approx(0.004, rel=0.05)


def test_a_straight_line_leaves_the_exponent_open_at_the_end_of_the_range():
    fit = fit_loss_law(TOKENS, 3 - 0.2 * np.log(TOKENS / TOKENS[0]) + 0.05 * np.sin(TOKENS), tolerance=0.9)
    assert fit.equivalent[0] == EXPONENTS[0]


def test_curves_that_are_none_are_refused_by_name():
    with pytest.raises(ValueError, match="tokens must be at least 5 increasing numbers, got 4"):
        fit_loss_law(TOKENS[:4], law(2, 1)[:4])
    with pytest.raises(ValueError, match="tokens must be at least 5 increasing"):
        fit_with_floor(TOKENS[::-1], law(2, 1), 0)
    with pytest.raises(ValueError, match="independent must lie in 4 to 24, got 30"):
        fit_loss_law(TOKENS, law(2, 1), independent=30)
    with pytest.raises(ValueError, match="loss"):
        fit_loss_law(TOKENS, law(2, 1)[:-1])
