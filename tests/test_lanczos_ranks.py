"""A run shared by 2 or 4 ranks is the run of one: same spectrum, few collectives, checkpoints, failures that speak."""

import dataclasses
import math
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nqflib.curvature import SQUARED_ERROR, Curvature
from nqflib.lanczos import Stop, lanczos, lockstep, random_starts
from nqflib.lanczos import ranks as ranks_module
from nqflib.lanczos.ranks import LostRankError, Ranks, share_of_mean
from nqflib.language_model import storage
from nqflib.quadrature import gauss

DEPTH, SECONDS = 30, 60
LAZY = "torch.fx.experimental.symbolic_shapes"  # imported by the first product, for two seconds
FORMATS = {
    "delayed": {"method": "delayed"},
    "twice": {"method": "twice"},
    "half width": {"basis_dtype": torch.float16},
}
pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def quiet_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NQF_PROGRESS", str(tmp_path / "progress"))


# ---------------------------------------------------------------------------------- several ranks


def together(count, work, folder, *arguments, timeout=SECONDS):
    """`work(*arguments)` on `count` ranks; what each returned, or the text of what it raised, None for a killed one."""
    context = multiprocessing.get_context("forkserver")  # imports torch once, and forks before any thread is there
    context.set_forkserver_preload(["nqflib.curvature", "nqflib.lanczos", "nqflib.quadrature", "pytest", LAZY])
    meeting = folder / f"meeting_{time.monotonic_ns()}"
    meeting.mkdir()
    processes = [
        context.Process(target=_one_rank, args=(rank, count, meeting, timeout, work, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode is not None, "a rank hangs"
    files = [meeting / f"rank_{rank}.pt" for rank in range(count)]
    return [torch.load(file, weights_only=False) if file.is_file() else None for file in files]


def _one_rank(rank, count, meeting, timeout, work, arguments):
    torch.set_num_threads(1)
    os.environ["NQF_PROGRESS"] = str(meeting / f"progress_{rank}")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
    )
    try:
        found = work(*arguments)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    aside = meeting / f"rank_{rank}.new"
    torch.save(found, aside)
    aside.rename(meeting / f"rank_{rank}.pt")


# ------------------------------------------------------------------------------------ the problem


def network(dtype=torch.float32):
    """A net of 197 parameters, which neither 2 nor 4 divides, and seven batches of different sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)
    sizes = [9, 8, 7, 6, 5, 4, 3]
    return model, [(torch.randn(k, 6, dtype=dtype), torch.randn(k, 5, dtype=dtype)) for k in sizes]


def start(dtype=torch.float32, n=197):
    return random_starts(1, n, torch.Generator().manual_seed(1), dtype=dtype)[0]


def spectrum(dtype=torch.float32, spoil=None, **options):
    """Gauss-Newton of the net, on this rank's batches; `spoil(call, product)` may change a product."""
    model, batches = network(dtype)
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    curvature = Curvature(model, batches[rank::count], loss=SQUARED_ERROR)
    product, calls = share_of_mean(curvature.gauss_newton, curvature.terms), []

    def operator(v):
        calls.append(0)
        return product(v) if spoil is None else spoil(len(calls), product(v))

    return lanczos(operator, start(dtype), DEPTH, across_ranks=dist.is_initialized(), **options)


def numbers(run):
    """What can be sent between processes."""
    found = {field.name: getattr(run, field.name) for field in dataclasses.fields(run) if field.name != "ranks"}
    return found | {"basis": torch.stack([run.basis.row(j, torch.float64) for j in range(run.alphas.size)])}


def joined(all_ranks):
    """The basis from every rank's columns, without the padding."""
    return torch.cat([found["basis"] for found in all_ranks], 1)[:, :197]


def ritz_difference(one, other):
    """Largest difference of Ritz values as a share of the largest."""
    nodes = [gauss(found["alphas"], found["betas"]).nodes for found in (one, other)]
    return np.abs(nodes[0] - nodes[1]).max() / np.abs(nodes[0]).max()


def identical(one, other):
    return all(np.array_equal(one[name], other[name]) for name in ("alphas", "betas", "basis"))


# --------------------------------------------------------------------------------------- spectrum


def _spectra():
    weights = np.eye(DEPTH)[:3]
    found = {}
    for name, options in FORMATS.items():
        run = spectrum(**options)
        ritz = {"masses": run.ritz_masses(weights, [96, 1, 100]), "vectors": run.ritz_vectors(weights)}
        found[name] = numbers(run) | ritz
    found["float64"] = numbers(spectrum(torch.float64))
    eigenvalues, starts = torch.arange(1.0, 6, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64)
    starts[1, 2:] = 0
    share = 1 / (dist.get_world_size() if dist.is_initialized() else 1)
    runs = lockstep(lambda Q: share * Q * eigenvalues, starts, 9, across_ranks=dist.is_initialized())
    return found | {"five": numbers(runs[0]), "two of five": numbers(runs[1])}


@pytest.fixture(scope="module")
def one():
    return _spectra()


@pytest.mark.parametrize("count", [2, 4])
def test_several_ranks_have_the_spectrum_of_one(count, one, tmp_path):
    all_ranks = together(count, _spectra, tmp_path)
    for found in all_ranks:
        for name in FORMATS:
            assert ritz_difference(one[name], found[name]) < 1e-5
            assert found[name]["start_norm"] == one[name]["start_norm"]
            for ritz in ("masses", "vectors"):
                np.testing.assert_allclose(found[name][ritz], one[name][ritz], atol=1e-5)
        assert ritz_difference(one["float64"], found["float64"]) < 1e-12
        # Four ranks share five parameters as 2, 2, 1 and none, and the whole space is that of all.
        assert found["five"]["stop"] is Stop.WHOLE_SPACE
        nodes = gauss(found["five"]["alphas"], found["five"]["betas"]).nodes
        np.testing.assert_allclose(nodes, range(1, 6), rtol=1e-13)
        assert found["two of five"]["stop"] is Stop.INVARIANT
        assert found["two of five"]["alphas"].size == 2
        for name in one:
            np.testing.assert_array_equal(found[name]["alphas"], all_ranks[0][name]["alphas"])
    Q = joined([found["float64"] for found in all_ranks])
    assert Q.shape == (DEPTH, 197)
    assert (Q @ Q.T - torch.eye(DEPTH)).abs().max() < 1e-13


def _counts():
    found, counts = {}, {}

    def counting(original, name):
        def call(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        return call

    ranks_module._all_gather = counting(ranks_module._all_gather, "gather")
    ranks_module._reduce_scatter = counting(ranks_module._reduce_scatter, "scatter")
    dist.all_reduce = counting(dist.all_reduce, "sum")
    for method in ("delayed", "twice"):
        counts.update(gather=0, scatter=0, sum=0)
        after = []

        def note(call, product, after=after):
            after.append(tuple(counts.values()))
            return product

        spectrum(spoil=note, method=method, monitor_every=10)
        found[method] = np.diff(after, axis=0)
    return found


def test_a_step_gathers_once_scatters_once_and_sums_once_or_three_times(tmp_path):
    for found in together(2, _counts, tmp_path):
        for method, sums in (("delayed", 1), ("twice", 3)):
            expected = np.tile([1, 1, sums], (DEPTH - 1, 1))
            expected[9::10, 2] += 1  # the monitor, after steps 10 and 20
            np.testing.assert_array_equal(found[method], expected)


# ---------------------------------------------------------------------------------------- failures


def _disagreeing(differing):
    options = {"start": start(), "depth": 3} | {name: values[dist.get_rank()] for name, values in differing.items()}
    lanczos(lambda q: q, across_ranks=True, **options)


@pytest.mark.parametrize(
    ("differing", "message"),
    [
        ({"depth": (3, 4)}, "ValueError: depth must be the same on all ranks, got 3, 4"),
        ({"start": (start(), 2 * start())}, "ValueError: starts must be the same on all ranks"),
        ({"save_every": (5, 6)}, "ValueError: save_every must be the same on all ranks, got 5, 6"),
    ],
    ids=["depth", "starts", "save_every"],
)
def test_ranks_that_ask_for_different_runs_are_refused(differing, message, tmp_path):
    for text in together(2, _disagreeing, tmp_path, differing):
        assert message in text


def _poisoned():
    def poison(call, product):
        return product * math.nan if call == 14 and dist.get_rank() == 1 else product

    return {name: numbers(spectrum(spoil=poison, **options)) for name, options in FORMATS.items()}


def test_nan_on_one_rank_stops_all_of_them_at_that_step(tmp_path):
    for found in together(2, _poisoned, tmp_path):
        for name in FORMATS:
            assert found[name]["stop"] is Stop.NOT_FINITE
            assert found[name]["step"] == 14
            assert found[name]["alphas"].size == 13
            assert np.isfinite(found[name]["alphas"]).all()


def _silent():
    def wait(call, product):
        nonlocal begin
        begin = time.monotonic()
        if call == 5 and dist.get_rank() == 1:
            time.sleep(4)
        return product

    begin = 0.0
    try:
        spectrum(spoil=wait)
    except LostRankError as error:
        return str(error), time.monotonic() - begin
    return None


def test_a_silent_rank_ends_the_others_after_the_groups_timeout(tmp_path):
    message, seconds = together(2, _silent, tmp_path, timeout=1)[0]
    assert "rank 0 of 2 stops: another rank ended or did not answer" in message
    assert "go on from its last checkpoint" in message
    assert 0.9 < seconds < 3.5


# -------------------------------------------------------------------------------------- checkpoints


def _checkpointed(name, folder, killed=None):
    options = FORMATS[name] | {"folder": folder, "save_every": 5}

    calls = []

    def count(call, product):
        calls.append(0)
        if call == 13 and killed == "in a product" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return product

    if killed == "before the state is written" and dist.get_rank() == 0:
        rename, renames = storage._rename, []

        def killing(*files):
            renames.append(0)
            if len(renames) == 3:  # the others have flushed 15 rows, the state says 10
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*files)

        storage._rename = killing
    run = spectrum(spoil=count, **options)
    return numbers(run) | {"calls": len(calls)}


@pytest.mark.parametrize(
    ("name", "killed"), [("delayed", "in a product"), ("half width", "before the state is written")]
)
def test_after_the_loss_of_a_rank_the_run_goes_on_with_as_many_or_others(name, killed, tmp_path):
    one = numbers(spectrum(**FORMATS[name]))
    whole = together(2, _checkpointed, tmp_path, name, None)
    left = together(2, _checkpointed, tmp_path, name, tmp_path / "run", killed)
    lost = 1 if killed == "in a product" else 0
    assert left[lost] is None
    assert f"LostRankError: rank {1 - lost} of 2 stops: another rank ended or did not answer" in left[1 - lost]
    for copy in ("four", "again"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    again = together(2, _checkpointed, tmp_path, name, tmp_path / "again")
    four = together(4, _checkpointed, tmp_path, name, tmp_path / "four")
    single = _checkpointed(name, tmp_path / "run")
    for found in (*again, *four, single):
        assert found["calls"] == DEPTH - 10
        assert ritz_difference(one, found) < 1e-5
    assert all(identical(before, after) for before, after in zip(whole, again, strict=True))
    assert torch.equal(joined(four)[:10], joined(whole)[:10])
    assert torch.equal(joined([single])[:10], joined(whole)[:10])
    assert [file.name for file in (tmp_path / "run").glob("*.rows")] == ["basis_0.rows"]
    assert len(list((tmp_path / "four").glob("*.rows"))) == 4
    # What was written with another number of ranks is whole, and read back by yet another.
    finished = together(2, _checkpointed, tmp_path, name, tmp_path / "four")
    assert finished[0]["calls"] == 0
    np.testing.assert_array_equal(finished[0]["alphas"], four[0]["alphas"])
    assert torch.equal(joined(finished), joined(four))


# ------------------------------------------------------------------------------------------ shards


def test_a_single_rank_has_the_whole_vectors():
    ranks, x = Ranks(5), torch.arange(10.0).view(2, 5)
    assert (ranks.width, ranks.first) == (5, 0)
    for made in (ranks.shard(x), ranks.whole(x), ranks.sum_to_shard(x)):
        assert made.data_ptr() == x.data_ptr()


def test_a_share_without_terms_is_refused():
    with pytest.raises(ValueError, match="terms must be at least 1 on every rank, got 0"):
        share_of_mean(lambda v: v, 0)
