"""Three claims about the Lotka-Volterra flow, measured: speed with a dense coupling, trust, and a million modes.

1. With a dense competition of 1,000 overlapping features the flow in ln z takes at most a third of the time of
   torchdiffeq and of diffrax (compiled before it is timed) at equal error, 1e-7 of the abundances over 101 times. The
   peers get the same equation in ln z, with the same cap on the exponential, and the tolerance at which they are
   cheapest. A second problem, which is not stiff, shows where the advantage ends.
2. Solvers in z itself report success over wrong abundances or NaN when the initial abundance is small.
3. A million decoupled modes at 200 times cost at most four times as many exponentials, in less than 500 MB.

Both sides run in turn, five times, on one thread; medians are printed. The peers are optional:

    pip install torch torchdiffeq diffrax
    python benchmarks/lotka_volterra.py [coupled | trust | decoupled ...]
"""

from __future__ import annotations

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # before numpy is loaded
    os.environ[_variable] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import argparse
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.integrate import solve_ivp

from nqflib import lotka_volterra as lv

ERROR = 1e-7
REPETITIONS = 5
TOLERANCES = tuple(10.0**-power for power in np.arange(6, 10.6, 0.5))


class Problem(NamedTuple):
    """A flow to be solved at `times`."""

    name: str
    rates: np.ndarray
    competition: np.ndarray
    abundance: float
    times: np.ndarray

    @property
    def start(self) -> np.ndarray:
        return np.full(self.rates.size, np.log(self.abundance))

    @property
    def cap(self) -> float:
        return float(np.log(np.abs(self.rates).max() / self.competition.diagonal().min())) + 30


Solver = Callable[[Problem, float, float], np.ndarray]  # (problem, rtol, atol) -> abundances (T, K)


def overlapping_features(modes: int, abundance: float, horizon: float) -> Problem:
    """Structure matrices with eigenvalues in [0, 1]: every pair of modes competes, one direction is very stiff."""
    generator = np.random.default_rng(0)
    eigenvalues = generator.uniform(0, 1, (2 * modes, modes)) / np.sqrt(modes)
    rates, competition = lv.rates_and_competition(eigenvalues, eigenvalues @ generator.uniform(0.1, 1, modes))
    name = f"overlapping features, z(0) = {abundance:.0e}"
    return Problem(name, rates, competition, abundance, np.linspace(0, horizon, 101))


def gaussian_features(modes: int, abundance: float, horizon: float) -> Problem:
    """Gaussian eigenvalues: competition of either sign, all time scales alike, so that no method needs to be implicit."""
    generator = np.random.default_rng(0)
    eigenvalues = generator.standard_normal((2 * modes, modes))
    rates, competition = lv.rates_and_competition(eigenvalues, eigenvalues @ generator.uniform(0.1, 1, modes))
    name = f"Gaussian features, z(0) = {abundance:.0e}"
    return Problem(name, rates, competition, abundance, np.linspace(0, horizon, 101))


# --------------------------------------------------------------------------------------- solvers


def ours(problem: Problem, rtol: float, atol: float) -> np.ndarray:
    """The flow of this package; it has one tolerance."""
    return lv.flow(problem.rates, problem.competition, problem.abundance, problem.times, tolerance=atol).abundances


def torchdiffeq_solver() -> Solver:
    """dopri5 of torchdiffeq, in ln z."""
    import torch
    from torchdiffeq import odeint

    torch.set_num_threads(1)

    def solve(problem: Problem, rtol: float, atol: float) -> np.ndarray:
        rates, competition, start, times = map(
            torch.tensor, (problem.rates, problem.competition, problem.start, problem.times)
        )
        cap = problem.cap

        def speed(_: Any, x: Any) -> Any:
            return rates - competition @ torch.exp(torch.clamp(x, max=cap))

        with torch.no_grad():
            return np.exp(odeint(speed, start, times, rtol=rtol, atol=atol, method="dopri5").numpy())

    return solve


def diffrax_solver() -> Solver:
    """Tsit5 of diffrax, in ln z, compiled once for each problem and tolerance."""
    import diffrax
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    compiled: dict[tuple[str, float, float], Any] = {}

    def solve(problem: Problem, rtol: float, atol: float) -> np.ndarray:
        key = (problem.name, rtol, atol)
        if key not in compiled:
            rates, competition, times = map(jnp.array, (problem.rates, problem.competition, problem.times))
            cap = problem.cap
            term = diffrax.ODETerm(lambda _, x, __: rates - competition @ jnp.exp(jnp.minimum(x, cap)))

            def run(x: Any) -> Any:
                return diffrax.diffeqsolve(
                    term,
                    diffrax.Tsit5(),
                    0.0,
                    times[-1],
                    None,
                    x,
                    saveat=diffrax.SaveAt(ts=times),
                    stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol),
                    max_steps=10**6,
                ).ys

            compiled[key] = jax.jit(run)
            compiled[key](jnp.array(problem.start)).block_until_ready()
        return np.exp(np.array(compiled[key](jnp.array(problem.start)).block_until_ready()))

    return solve


def peers() -> dict[str, Solver]:
    """The peers that are installed; a line for each one that is not."""
    found: dict[str, Solver] = {}
    for name, build in (("torchdiffeq dopri5", torchdiffeq_solver), ("diffrax Tsit5", diffrax_solver)):
        try:
            found[name] = build()
        except ImportError as error:
            print(f"{name} is left out: {error}. Install it with: pip install torch torchdiffeq diffrax")
    return found


# ----------------------------------------------------------------------------------- 1. coupled


def cheapest(solve: Solver, problem: Problem, exact: np.ndarray) -> tuple[float, float, float]:
    """Return rtol, atol and error of the cheapest setting with an error of at most ERROR."""
    settings = []
    for absolute_only in (False, True):
        if absolute_only and solve is ours:
            continue
        for tolerance in TOLERANCES:
            rtol = 1e-13 if absolute_only else tolerance
            solve_error = np.abs(solve(problem, rtol, tolerance) - exact).max()
            if solve_error <= ERROR:
                begin = time.perf_counter()
                solve(problem, rtol, tolerance)
                settings.append((time.perf_counter() - begin, rtol, tolerance, float(solve_error)))
                break
    if not settings:
        raise RuntimeError(f"no tolerance reaches an error of {ERROR} on {problem.name}")
    return min(settings)[1:]


def interleaved(tasks: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each task, all of them run in turn REPETITIONS times."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(REPETITIONS):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def coupled(modes: int = 1000) -> bool:
    """Print the times of the dense flow; True if the claim holds on the problems it is made for."""
    solvers = {"nqflib": ours, **peers()}
    problems = {
        overlapping_features(modes, 1e-30, 3000.0): True,
        overlapping_features(modes, 1e-6, 3000.0): True,
        gaussian_features(modes, 1e-6, 100.0): False,
    }.items()
    holds = True
    print(f"\n1. dense competition, K = {modes}, error at most {ERROR:.0e}: median of {REPETITIONS}, one thread")
    for problem, claimed in [(p, c) for p, c in problems]:
        exact = lv.flow(problem.rates, problem.competition, problem.abundance, problem.times, tolerance=1e-12).abundances
        chosen = {name: cheapest(solve, problem, exact) for name, solve in solvers.items()}
        tasks = {name: lambda s=solve, c=chosen[name], p=problem: s(p, *c[:2]) for name, solve in solvers.items()}
        seconds = interleaved(tasks)
        print(f"\n{problem.name}, t = 0 .. {problem.times[-1]:.0f}" + ("" if claimed else "  (no claim)"))
        for name, (rtol, atol, error) in chosen.items():
            ratio = seconds[name] / seconds["nqflib"]
            print(f"  {name:20} {seconds[name]:8.2f} s  {ratio:6.1f} x   rtol {rtol:.0e} atol {atol:.1e} error {error:.0e}")
            holds &= not claimed or name == "nqflib" or ratio >= 3
    return holds
