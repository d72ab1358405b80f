"""Grids of trials: each cell is the trial of the search, kept when done, and the same from any number of processes."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from small_runs import small_run, write_text

from nqflib import reference
from nqflib.language_model import grids
from nqflib.language_model.edges import RUNAWAY, largest_stable, stream_after
from nqflib.language_model.grids import Grid, loss_growth, stability_grid
from nqflib.language_model.pretrain import pretrain
from nqflib.language_model.storage import DamagedFileError

BATCHES, FACTORS, SEEDS, STEPS = (2, 4), (2.0**-8, 0.5, 1024.0), (0, 1, 2), (10, 6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grids")
    run = small_run(write_text(folder))
    return run, pretrain(run, folder=folder)


def grid_of(trained, folder, seeds=SEEDS, jobs=1, **changes):
    run, result = trained
    arguments = {"batches": BATCHES, "factors": FACTORS, "steps": STEPS} | changes
    steps = arguments.pop("steps")
    axes = (arguments["batches"], arguments["factors"], seeds)
    return stability_grid(run, result.checkpoint(0.9), result.corpus, *axes, steps=steps, jobs=jobs, folder=folder)


@pytest.fixture(scope="module")
def grid(trained, tmp_path_factory):
    return grid_of(trained, tmp_path_factory.mktemp("cells"))


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
               for name in ("largest", "last", "stopped", "growth"))  # fmt: skip


def test_each_trial_is_that_of_the_search(trained, grid, tmp_path):
    run, result = trained
    point = result.checkpoint(0.9)
    assert grid.rate == point.rate
    for i, (batch, steps) in enumerate(zip(BATCHES, STEPS, strict=True)):
        for j, factor in enumerate(FACTORS):
            for k, seed in enumerate(SEEDS):
                stream = stream_after(run, point, result.corpus, batch * steps, seed=seed)
                trial = largest_stable(
                    run, point, stream, batch, steps=steps, factors=[factor], folder=tmp_path
                ).trials[0]
                assert (trial.largest, trial.stopped or 0) == (grid.largest[i, j, k], grid.stopped[i, j, k])
                assert trial.last == grid.last[i, j, k]
    assert grid.stopped[:, 0].max() == 0
    assert grid.stopped[:, 2].min() > 0


def test_shares_and_boundaries_are_counted_over_seeds():
    stopped = np.array([[[0, 0, 0, 0], [0, 0, 0, 9], [0, 0, 9, 9]], [[9, 9, 9, 9], [0, 9, 9, 9], [0, 0, 0, 9]]])
    last = np.where(stopped > 0, 5.0, 0.9)
    last[0, 0, :2] = 1.1
    zeros = np.zeros_like(last)
    grid = Grid(0.1, (8, 16), (0.5, 1.0, 2.0), (0, 1, 2, 3), (9, 9), zeros, last, stopped, zeros, 0.0)
    assert grid.stable().tolist() == [[1, 0.75, 0.5], [0, 0.25, 0.75]]
    assert grid.stable(sharp=True).tolist() == [[0.5, 0.75, 0.5], [0, 0.25, 0.75]]
    assert grid.boundary().tolist() == [1, 2]  # a half is no majority; a hole below does not count
    none = replace(grid, stopped=np.full_like(stopped, 3))
    assert none.boundary().tolist() == [0, 0]


def test_a_grid_that_was_killed_goes_on_and_more_processes_give_the_same(trained, grid, tmp_path, monkeypatch):
    work, calls = grids._work, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return work(*arguments)

    monkeypatch.setattr(grids, "_work", dies)
    with pytest.raises(KeyboardInterrupt):
        grid_of(trained, tmp_path)
    kept = {file: file.read_bytes() for file in (tmp_path / "grids").glob("*.json")}
    assert len(kept) == 3
    monkeypatch.setattr(grids, "_work", work)
    assert same(grid_of(trained, tmp_path, jobs=2), grid)
    assert all(file.read_bytes() == content for file, content in kept.items())
    monkeypatch.setattr(grids, "_work", lambda *_: pytest.fail("it was computed again"))
    assert same(grid_of(trained, tmp_path), grid)
    fewer = grid_of(trained, tmp_path, seeds=(0, 1))
    assert np.array_equal(fewer.largest, grid.largest[:, :, :2])


def test_a_damaged_cell_is_named_and_wrong_input_refused(trained, tmp_path):
    small = {"batches": (2,), "factors": (0.5,), "steps": 2}
    grid_of(trained, tmp_path, seeds=(0,), **small)
    (file,) = (tmp_path / "grids").glob("*.json")
    file.write_text(file.read_text()[:-9])
    with pytest.raises(DamagedFileError, match=f"{file.name} is damaged"):
        grid_of(trained, tmp_path, seeds=(0,), **small)
    file.write_text('{"losses": [], "seconds": 1.0}')
    with pytest.raises(DamagedFileError, match="losses are missing"):
        grid_of(trained, tmp_path, seeds=(0,), **small)
    for wrong, message in [
        ({"batches": ()}, "must not be empty"),
        ({"steps": (3, 4, 5)}, "one number or one for each batch"),
        ({"factors": (1.0, 0.0)}, "must be positive"),
        ({"steps": 0}, "must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            grid_of(trained, tmp_path, **wrong)


def test_a_grid_survives_standard_json(grid):
    broken = replace(grid, largest=grid.largest.copy(), last=grid.last.copy(), growth=grid.growth.copy())
    broken.largest[0, 2, 0], broken.last[0, 2, 0], broken.growth[0, 2, 0] = math.inf, math.nan, math.nan
    text = json.dumps(broken.as_json(), allow_nan=False)
    read = Grid.from_json(json.loads(text))
    assert same(read, broken)
    assert (read.rate, read.batches, read.steps, read.seeds) == (grid.rate, BATCHES, STEPS, SEEDS)
    stored = json.loads(text)
    with pytest.raises(ValueError, match=r"arrays must be \(2, 3, 3\)"):
        Grid.from_json({**stored, "last": stored["last"][:1]})
    with pytest.raises(ValueError, match="not a stability grid: KeyError 'growth'"):
        Grid.from_json({name: value for name, value in stored.items() if name != "growth"})


def test_growth_is_the_slope_of_the_logarithm_over_the_second_half():
    losses = [*np.full(6, 3.0), *np.exp(0.25 * np.arange(6))]
    assert loss_growth(losses) == pytest.approx(0.25, rel=1e-12)
    assert math.isnan(loss_growth([3.0, 9.0]))
    assert math.isnan(loss_growth([3.0, 3.0, -1.0, 2.0]))
    assert math.isnan(loss_growth([3.0, 3.0, 4.0, math.inf]))


def test_the_recorded_grid_is_the_papers_at_the_laptops_run():
    settings = reference.load("stability_grid")["settings"]  # its hash is compared
    assert (settings["preset"], settings["batch"], settings["length"]) == ("laptop", 32, 0.1)
    for done, grid in grids.recorded():
        assert done == pytest.approx(0.379, abs=0.001)
        assert (grid.batches, grid.factors) == ((8, 16, 32, 64, 128), grids.SHARES)
        assert grid.steps == (420, 210, 105, 100, 100)
        assert len(grid.seeds) == settings["seeds"]
        assert np.array_equal(grid.stopped > 0, grid.largest > RUNAWAY)
        # a rate, or a batch, that makes all seeds runaways is followed by no rate, or smaller batch, that makes none
        share = grid.stable()
        assert ((share[:, :-1] > 0) | (share[:, 1:] < 1)).all()
        assert ((share[1:] > 0) | (share[:-1] < 1)).all()
