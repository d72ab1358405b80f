import doctest

import numpy as np
import pytest

from nqflib import lotka_volterra as lv
from nqflib import staircase as module
from nqflib.staircase import Ending, sample_wise_limit, staircase


def random_problem(seed):
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((12, 8))
    return G.T @ rng.standard_normal(12), G.T @ G  # regression of 12 Gaussian targets on 8 features


def test_the_example_in_the_module_holds():
    assert doctest.testmod(module).failed == 0


def test_without_competition_each_mode_enters_at_the_inverse_of_its_rate():
    r = np.array([1.0, 0.5, 0.25])
    steps = staircase(r, np.ones(3))
    assert steps.switch_on_times() == pytest.approx(1 / r)
    assert steps.equilibria[-1] == pytest.approx(r)
    assert steps.ending is Ending.SETTLED


@pytest.mark.parametrize("seed", range(30))
def test_every_stage_solves_the_complementarity_problem_of_its_modes(seed):
    r, C = random_problem(seed)
    steps = staircase(r, C)
    for z, w in zip(steps.equilibria, steps.invasion_rates, strict=True):
        assert (z >= 0).all()
        assert np.abs(z * (r - C @ z)).max() < 1e-9
        assert w[z == 0] == pytest.approx((r - C @ z)[z == 0], abs=1e-9)
    assert (r - C @ steps.equilibria[-1] <= 1e-9).all()
    assert (np.diff(steps.times) >= 0).all()


def crossings(r, C, steps, eps):
    """Modes in the order in which they rise above an abundance of 1e-4, and in which they fall below it."""
    log = np.log(1 / eps)
    times = np.linspace(0, 1.5 * steps.times[-1] * log, 6000)[1:]
    x = lv.flow(r, C, eps, times).log_abundances
    above = x > np.log(1e-4)
    change = np.diff(above.astype(int), axis=0, prepend=0)
    return [int(k) for _, k in np.argwhere(change == 1)], [int(k) for _, k in np.argwhere(change == -1)]


def test_the_flow_at_1e_30_goes_through_the_same_entries_and_exits():
    compared = 0
    for seed in range(200):
        r, C = random_problem(seed)
        steps = staircase(r, C)
        if not (np.diff(steps.times) > 0.1 * steps.times[:-1]).all():
            continue
        compared += 1
        entered, left = crossings(r, C, steps, 1e-30)
        assert entered == [k for modes in steps.entered for k in modes], seed
        assert left == [k for modes in steps.left for k in modes], seed
    assert compared >= 120


def test_the_error_of_the_switch_on_times_falls_as_the_inverse_logarithm():
    ratios = []
    for seed in range(30):
        r, C = random_problem(seed)
        steps = staircase(r, C)
        limit = steps.switch_on_times()
        modes = np.flatnonzero(np.isfinite(limit))
        first = steps.equilibria[steps.stages(np.sort(limit[modes])), modes[np.argsort(limit[modes])]]
        half = first[np.argsort(np.argsort(limit[modes]))] / 2
        errors = []
        for eps in (1e-15, 1e-30):
            log = np.log(1 / eps)
            times = np.linspace(0, 1.5 * steps.times[-1] * log, 4000)[1:]
            x = lv.flow(r, C, eps, times).log_abundances
            entered = lv.first_crossings(times, x[:, modes], np.log(half)) / log
            errors.append(np.abs(entered - limit[modes]).max())
        ratios.append(errors[1] / errors[0])
    assert np.isfinite(ratios).sum() >= 25
    assert np.nanmedian(ratios) == pytest.approx(0.5, abs=0.03)  # ln(1e15) / ln(1e30)


def test_heights_move_in_straight_lines_between_jumps_and_stay_at_zero_while_present():
    r, C = random_problem(3)
    steps = staircase(r, C)
    tau = np.linspace(0, steps.times[-1] * 1.2, 50)
    heights = steps.log_heights(tau)
    assert (heights <= 1e-9).all()
    assert heights[0] == pytest.approx(-np.ones(8))
    assert heights[steps.abundances(tau) > 0] == pytest.approx(0.0, abs=1e-12)


def test_a_horizon_stops_before_the_next_jump():
    steps = staircase([1.0, 0.5], np.ones(2), horizon=1.5)
    assert steps.ending is Ending.HORIZON
    assert steps.entered == ((0,),)


def test_the_sample_wise_limit_is_the_sum_of_the_labels_still_unlearned():
    loss = sample_wise_limit([0.1, 0.6, 1.1], [2.0, 1.0], [3.0, 1.0])
    assert loss == pytest.approx([(9 + 1) / 2, 1 / 2, 0.0])


@pytest.mark.parametrize(
    ("rates", "competition", "message"),
    [
        ([-1.0, -0.5], np.eye(2), "rates"),
        ([1.0, 0.5], [[1.0, 0.5], [0.0, 1.0]], "competition"),
        ([1.0, 0.5], -np.eye(2), "competition"),
        ([1.0, 0.5], np.eye(3), "competition"),
    ],
)
def test_wrong_arguments_are_refused_by_name(rates, competition, message):
    with pytest.raises(ValueError, match=message):
        staircase(rates, competition)
