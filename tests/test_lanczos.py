"""Known spectra, orthogonality, breakdowns, formats of the basis, lockstep, Ritz vectors."""

import doctest
import math

import numpy as np
import pytest
import torch
from scipy.fft import dct, idct

import nqflib.lanczos
from nqflib.lanczos import Basis, Stop, lanczos, lockstep, random_starts
from nqflib.lanczos.basis import dot, gram, norm
from nqflib.quadrature import gauss, measure_band, rank_curve, symlog_values
from nqflib.tails import tail

N, DEPTH = 20_000, 300


@pytest.fixture(autouse=True)
def quiet_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NQF_PROGRESS", str(tmp_path / "progress"))


def known_spectrum(n=N):
    """1/i with six outliers, one of them negative."""
    eigenvalues = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    eigenvalues[:6] += torch.tensor([10, 6, 4, 2.5, 1.7, -0.8], dtype=torch.float64)
    return eigenvalues


def localised(dtype, n=N):
    """A with eigenvectors close to the coordinate axes: three reflections about random vectors."""
    generator = torch.Generator().manual_seed(0)
    mirrors = torch.randn(3, n, generator=generator, dtype=torch.float64)
    mirrors = [m.to(dtype) for m in mirrors / mirrors.norm(dim=1, keepdim=True)]
    eigenvalues = known_spectrum(n).to(dtype)

    def reflect(v, mirror):
        return v - 2 * dot(mirror, v).to(dtype) * mirror

    def apply(v):
        for mirror in mirrors:
            v = reflect(v, mirror)
        v = eigenvalues * v
        for mirror in mirrors[::-1]:
            v = reflect(v, mirror)
        return v

    return apply


def spread_out(dtype, n=N):
    """A with spread-out eigenvectors, as a network's are: random signs and a cosine transform."""
    signs = torch.randn(n, generator=torch.Generator().manual_seed(0)).sign().numpy()
    eigenvalues = known_spectrum(n).to(dtype).numpy()

    def apply(v):
        return torch.from_numpy(idct(eigenvalues * dct(signs * v.numpy(), norm="ortho"), norm="ortho") * signs)

    return apply


def recording(operator, queries):
    def apply(v):
        queries.append(v.clone())
        return operator(v)

    return apply


def orthogonality(vectors):
    V = torch.stack(vectors).double()
    return (V @ V.T - torch.eye(len(V), dtype=torch.float64)).abs().max().item()


def top_error(run, eigenvalues, count=20):
    """Largest error of the `count` Ritz values of largest size, as a share of ||A||."""
    true = eigenvalues.numpy()
    nodes = gauss(run.alphas, run.betas).nodes
    found, wanted = (np.sort(x[np.argsort(-np.abs(x))[:count]]) for x in (nodes, true))
    return np.abs(found - wanted).max() / np.abs(true).max()


def ghosts(run, eigenvalues):
    """Converged Ritz values beyond the first at one eigenvalue."""
    rule = gauss(run.alphas, run.betas)
    converged = rule.nodes[rule.residuals < 1e-6 * np.abs(rule.nodes)]
    nearest = np.abs(converged[:, None] - eigenvalues.numpy()).argmin(1)
    return converged.size - np.unique(nearest).size


def start(n=N, dtype=torch.float64, seed=1):
    return random_starts(1, n, torch.Generator().manual_seed(seed), dtype=dtype)[0]


def test_examples_in_the_package_run():
    names = {"torch": torch, "gauss": gauss}
    assert doctest.testmod(nqflib.lanczos, extraglobs=names).failed == 0


# ------------------------------------------------------------------------------- known spectrum


@pytest.mark.parametrize("method", ["delayed", "twice"])
@pytest.mark.parametrize(
    ("dtype", "orthogonal", "accurate"), [(torch.float32, 2e-6, 3e-7), (torch.float64, 1e-13, 1e-13)]
)
def test_a_known_spectrum_at_depth_300(method, dtype, orthogonal, accurate):
    run = lanczos(localised(dtype), start(dtype=dtype), DEPTH, method=method)
    assert run.stop is Stop.DEPTH
    assert run.alphas.size == run.betas.size == DEPTH
    assert run.basis.gram_error(DEPTH) <= orthogonal
    assert 0 < run.orthogonality <= orthogonal  # the cheap monitor
    assert top_error(run, known_spectrum()) <= accurate
    assert ghosts(run, known_spectrum()) == 0
    assert abs(gauss(run.alphas, run.betas).weights.sum() - 1) < 1e-12


def test_a_q_is_q_t_and_a_residual():
    n, m = 400, 40
    operator = localised(torch.float64, n)
    for method in ("delayed", "twice"):
        run = lanczos(operator, start(n), m, method=method)
        Q = run.basis.rows[:m]
        T = torch.from_numpy(np.diag(run.alphas) + np.diag(run.betas[:-1], 1) + np.diag(run.betas[:-1], -1))
        residual = torch.stack([operator(q) for q in Q]) - T @ Q
        assert residual[:-1].abs().max() < 1e-13
        assert residual[-1].norm().item() == pytest.approx(run.betas[-1], rel=1e-12)
        assert (Q @ residual[-1]).abs().max() < 1e-13


def test_the_bands_hold_the_measure_of_the_start_and_the_rank_curve_the_true_ranks():
    eigenvalues, signs = known_spectrum(), torch.randn(N, generator=torch.Generator().manual_seed(0)).sign().numpy()
    starts = random_starts(2, N, torch.Generator().manual_seed(5), dtype=torch.float64)
    operator = spread_out(torch.float64)
    runs = lockstep(lambda Q: torch.stack([operator(q) for q in Q]), starts, 100)
    order = np.argsort(eigenvalues.numpy())
    values = symlog_values(-0.9, 11.5)
    for v, run in zip(starts, runs, strict=True):
        mass = dct(signs * v.numpy(), norm="ortho")[order] ** 2
        above = np.append(np.cumsum(mass[::-1])[::-1], 0)
        above /= above[0]
        truth = above[np.searchsorted(eigenvalues.numpy()[order], values, side="right")]
        band = measure_band(run.alphas, run.betas, values)
        assert ((band.lower <= truth) & (truth <= band.upper)).all()
    curve = rank_curve([(run.alphas, run.betas) for run in runs], N, values)
    true_ranks = N - np.searchsorted(eigenvalues.numpy()[order], values, side="right")
    lower, upper = curve.band()
    assert ((lower - 1e-6 <= true_ranks) & (true_ranks <= upper + 1e-6)).mean() >= 0.9
    exact = curve.sampling == 0
    np.testing.assert_array_equal(curve.ranks[exact], true_ranks[exact])


# ------------------------------------------------------------------------- formats of the basis


@pytest.mark.parametrize(
    ("operator", "format", "orthogonal", "accurate"),
    [
        (spread_out, torch.bfloat16, 1e-4, 5e-6),
        (spread_out, torch.float16, 2e-5, 5e-6),
        (localised, torch.bfloat16, 2e-3, 3e-4),
        (localised, torch.float16, 2e-3, 3e-4),
    ],
)
def test_a_basis_of_half_width(operator, format, orthogonal, accurate):
    queries = []
    run = lanczos(recording(operator(torch.float32), queries), start(dtype=torch.float32), 120, basis_dtype=format)
    assert run.basis.nbytes == 120 * N * 2
    assert orthogonality(queries) <= orthogonal
    assert top_error(run, known_spectrum()) <= accurate
    assert ghosts(run, known_spectrum()) == 0
    assert 0.05 * run.orthogonality <= orthogonality(queries)  # the monitor sees the rounding


def test_a_basis_of_half_width_leaves_the_tail_exponent_alone():
    exponents = []
    for format in (torch.float32, torch.bfloat16, torch.float16):
        run = lanczos(spread_out(torch.float32), start(dtype=torch.float32), 80, basis_dtype=format)
        curve = rank_curve([(run.alphas, run.betas)], N, np.geomspace(1e-4, 11.5, 80))
        exponents.append(tail(curve, (50, 5000)).exponent)
    assert np.ptp(exponents) < 0.02
    assert exponents[0] == pytest.approx(1, abs=0.15)


def test_a_float16_row_of_tiny_entries_keeps_eleven_bits():
    v = torch.randn(4096, generator=torch.Generator().manual_seed(2)) * 1e-7
    basis = Basis(4096, 2, torch.float16, torch.device("cpu"))
    basis.store(1, v)
    assert ((basis.row(1, torch.float32) - v).abs() <= 2**-11 * v.abs() + 1e-14).all()
    assert basis.measure(2, v[None])[0, 1] == pytest.approx((v.double() @ v.double()).item(), rel=1e-3)


def test_the_delayed_sweep_is_refused_for_a_basis_of_half_width():
    with pytest.raises(ValueError, match="method must be 'twice' for a basis in"):
        lanczos(lambda v: v, torch.ones(9), 3, method="delayed", basis_dtype=torch.bfloat16)


def test_norms_and_dots_of_long_float32_vectors_are_right_to_1e_7():
    x = torch.full((10_000_000,), 0.1)
    exact = math.sqrt(1e7) * float(np.float32(0.1))
    assert abs(norm(x).item() / exact - 1) < 1e-7
    assert abs(dot(x, x).item() / exact**2 - 1) < 1e-7
    small = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gram(small[:2], small[2]), small.double() @ small.double().T, rtol=1e-12, atol=1e-10)


# ------------------------------------------------------------------------------------ breakdown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["delayed", "twice"])
@pytest.mark.parametrize("fetch_every", [1, 32])
@pytest.mark.parametrize(
    ("diagonal", "expected"),
    [
        (torch.ones(50), [1.0]),
        (torch.cat([torch.ones(25), torch.full((25,), 50.0)]), [1.0, 50.0]),
        (torch.zeros(50), [0.0]),
        (torch.cat([1e-9 * torch.arange(1.0, 6), torch.zeros(45)]), [0, 1e-9, 2e-9, 3e-9, 4e-9, 5e-9]),
    ],
    ids=["identity", "two eigenvalues", "zero", "rank 5 at scale 1e-9"],
)
def test_an_invariant_space_gives_a_shorter_matrix_and_says_why(dtype, method, fetch_every, diagonal, expected):
    diagonal = diagonal.to(dtype)
    run = lanczos(lambda v: diagonal * v, start(50, dtype), 30, method=method, fetch_every=fetch_every)
    assert run.stop is Stop.INVARIANT
    assert run.step == run.alphas.size == len(expected)
    assert "invariant" in run.reason
    scale = max(map(abs, expected))
    np.testing.assert_allclose(gauss(run.alphas, run.betas).nodes, expected, atol=20 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("method", ["delayed", "twice"])
def test_a_depth_above_n_ends_with_the_whole_space(method):
    eigenvalues = torch.linspace(-1, 2, 12, dtype=torch.float64)
    run = lanczos(lambda v: eigenvalues * v, start(12), 40, method=method)
    assert run.stop is Stop.WHOLE_SPACE
    assert run.alphas.size == 12
    np.testing.assert_allclose(gauss(run.alphas, run.betas).nodes, eigenvalues, atol=1e-13)


@pytest.mark.parametrize("method", ["delayed", "twice"])
@pytest.mark.parametrize("clusters", [False, True])
def test_fast_decay_and_clusters_stay_finite_and_orthogonal_in_float32(method, clusters):
    n = 2000
    if clusters:
        eigenvalues = torch.arange(1.0, 6).repeat_interleave(n // 5) * (1 + 1e-9 * torch.rand(n))
    else:
        eigenvalues = 0.8 ** torch.arange(float(n))
    run = lanczos(lambda v: eigenvalues * v, start(n, torch.float32), 120, method=method)
    assert run.stop is Stop.INVARIANT
    assert np.isfinite(run.alphas).all()
    assert run.basis.gram_error(run.alphas.size) < 2e-6
    if clusters:
        np.testing.assert_allclose(gauss(run.alphas, run.betas).nodes, np.arange(1, 6), rtol=1e-6)
    else:
        np.testing.assert_allclose(gauss(run.alphas, run.betas).nodes[:-11:-1], eigenvalues[:10], atol=3e-7)


@pytest.mark.parametrize("fetch_every", [1, 32])
@pytest.mark.parametrize("method", ["delayed", "twice"])
def test_nan_stops_at_its_step_and_nothing_after_it_is_kept(method, fetch_every, tmp_path):
    operator, calls = spread_out(torch.float64, 500), []

    def failing(v):
        calls.append(0)
        return operator(v) * (math.nan if len(calls) == 14 else 1)

    options = {"method": method, "monitor_every": 4}
    run = lanczos(failing, start(500), 40, fetch_every=fetch_every, folder=tmp_path, save_every=5, **options)
    clean = lanczos(operator, start(500), 13, **options)
    assert run.stop is Stop.NOT_FINITE
    assert run.step == 14
    assert "(step 14)" in run.reason
    assert len(calls) == (14 if fetch_every == 1 else 15)  # a checkpoint looks at the flags too
    np.testing.assert_array_equal(run.alphas, clean.alphas)
    np.testing.assert_allclose(run.betas, clean.betas, rtol=1e-13)  # the last one of a delayed run by another route
    resumed = lanczos(operator, start(500), 40, folder=tmp_path, **options)  # from step 10
    np.testing.assert_array_equal(resumed.alphas, lanczos(operator, start(500), 40, **options).alphas)


def test_thresholds_are_relative():
    for scale in (1e-30, 1e30):
        eigenvalues = scale * torch.linspace(0.1, 1, 300, dtype=torch.float64)
        run = lanczos(lambda v, e=eigenvalues: e * v, start(300), 20)
        assert run.stop is Stop.DEPTH


# ------------------------------------------------------------------------------------- lockstep


def test_starts_in_lockstep_are_the_starts_alone_and_share_the_calls():
    eigenvalues, sizes = known_spectrum(600), []
    starts = random_starts(3, 600, torch.Generator().manual_seed(3), dtype=torch.float64)
    starts[1] = torch.eye(600, dtype=torch.float64)[:3].sum(0)  # breaks down at step 3

    def operator(Q):
        sizes.append(len(Q))
        return Q * eigenvalues

    runs = lockstep(operator, starts, 30)
    assert sizes == [3] * 4 + [2] * 26  # seen in the step after it
    assert [run.stop for run in runs] == [Stop.DEPTH, Stop.INVARIANT, Stop.DEPTH]
    np.testing.assert_allclose(gauss(runs[1].alphas, runs[1].betas).nodes, np.sort(eigenvalues[:3]), rtol=1e-13)
    for v, run in zip(starts, runs, strict=True):
        alone = lanczos(lambda q: q * eigenvalues, v, 30)
        np.testing.assert_array_equal(run.alphas, alone.alphas)
        assert run.start_norm == pytest.approx(v.norm().item(), rel=1e-14)


def test_the_operator_is_called_once_a_step_and_the_basis_read_twice_or_four_times(monkeypatch):
    reads = {"rows": 0}
    for name in ("measure", "subtract"):
        original = getattr(Basis, name)

        def counting(self, rows, *rest, _original=original):
            reads["rows"] += rows
            return _original(self, rows, *rest)

        monkeypatch.setattr(Basis, name, counting)
    m, eigenvalues, counts = 60, known_spectrum(500), {}
    for method in ("delayed", "twice"):
        reads["rows"], calls = 0, []
        lanczos(recording(lambda v: eigenvalues * v, calls), start(500), m, method=method, monitor_every=10**6)
        counts[method] = reads["rows"]
        assert len(calls) == m
    once = m * (m - 1) // 2
    assert counts["delayed"] <= 2.1 * once
    assert counts["twice"] <= 4.1 * once


# --------------------------------------------------------------------------------- Ritz vectors


@pytest.mark.parametrize("format", [torch.float64, torch.float16])
def test_ritz_vectors_are_eigenvectors_and_their_masses_sum_over_tensors(format):
    n, sizes = 9000, [4096, 1, 900, 4003]  # segments across the tiles' boundaries
    eigenvalues = known_spectrum(n)
    run = lanczos(lambda v: eigenvalues * v, start(n), 120, basis_dtype=format)
    T = np.diag(run.alphas) + np.diag(run.betas[:-1], 1) + np.diag(run.betas[:-1], -1)
    weights = np.linalg.eigh(T)[1].T[[-1, -2, 0]]
    vectors = run.ritz_vectors(weights)
    tolerance = 1e-10 if format is torch.float64 else 1e-3
    for vector, k in zip(vectors, (0, 1, 5), strict=True):
        assert abs(vector[k].item()) == pytest.approx(1, abs=tolerance)
    bulk = np.linalg.eigh(T)[1].T[60:62]
    expected = np.array(
        [[piece.double().square().sum().item() for piece in y.split(sizes)] for y in run.ritz_vectors(bulk)]
    )
    np.testing.assert_allclose(run.ritz_masses(bulk, sizes), expected, rtol=1e-6 if format is torch.float16 else 1e-12)
    with pytest.raises(ValueError, match="sizes must be positive and sum to n = 9000"):
        run.ritz_masses(bulk, [5, 5])


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lanczos(lambda v: v, torch.zeros(5), 3), "starts must be finite and not zero"),
        (lambda: lanczos(lambda v: v, torch.tensor([1.0, math.nan]), 3), "starts must be finite"),
        (lambda: lanczos(lambda v: v, torch.ones(5, dtype=torch.float16), 3), "starts must be float32 or float64"),
        (lambda: lanczos(lambda v: v, torch.ones(2, 5), 3), r"start must be a vector \(n,\)"),
        (lambda: lanczos(lambda v: v, torch.ones(5), 0), "depth must be a positive integer"),
        (lambda: lanczos(lambda v: v[:3], torch.ones(5), 2), r"operator must return shape \(1, 5\)"),
        (lambda: lanczos(lambda v: v, torch.ones(5), 2, on_disk=True), "on_disk needs a folder"),
        (lambda: lanczos(lambda v: v, torch.ones(5), 2, basis_dtype=torch.int8), "dtype of the basis must be one of"),
        (lambda: lanczos(lambda v: v, torch.ones(5), 2, method="once"), "method must be one of delayed, twice"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ----------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", ["delayed", "twice"])
def test_on_cuda_the_loop_never_waits_and_the_numbers_are_those_of_the_cpu(method):
    eigenvalues = known_spectrum(5000)
    here = lanczos(lambda v: eigenvalues * v, start(5000), 31, method=method, fetch_every=32)
    there_eigenvalues, v = eigenvalues.cuda(), start(5000).cuda()
    seen = []

    def operator(q):
        seen.append(0)
        torch.cuda.set_sync_debug_mode("error" if len(seen) < 31 else "default")
        return there_eigenvalues * q

    try:
        there = lanczos(operator, v, 31, method=method, fetch_every=32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    np.testing.assert_allclose(there.alphas, here.alphas, atol=1e-12)
    np.testing.assert_allclose(there.betas, here.betas, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_peak_is_the_basis_and_a_few_vectors():
    n, m = 2_000_000, 50
    v = torch.randn(n, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lanczos(lambda q: 2 * q + q.roll(1) + q.roll(-1), v, m)
    assert torch.cuda.max_memory_allocated() - before < 4 * n * (m + 12) + 3 * 2**28
