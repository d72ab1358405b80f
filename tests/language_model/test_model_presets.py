"""The presets' numbers against the paper's, and against each other."""

import pytest

from nqflib.language_model.presets import PRESETS, preset


def test_the_paper_s_runs_have_its_steps_and_rates():
    paper = preset("paper")
    assert paper.size.parameters == 167_772_160
    assert [paper.steps(batch) for batch in (1, 64, 1024)] == [2_929_688, 45_777, 2_862]
    assert [paper.peak_rate(batch) for batch in (1, 64, 1024)] == [2, 16, 16]
    assert [paper.peak_rate(64, base) for base in (4, 0.25)] == [32, 2]


def test_the_laptop_s_rates_follow_the_square_root_up_to_its_largest_batch():
    laptop = preset("laptop")
    assert laptop.size.parameters == 107_520
    assert laptop.tokens == 20 * 107_520
    assert [laptop.steps(batch) for batch in laptop.batches] == [8400, 1050, 263]
    assert [laptop.peak_rate(batch) for batch in laptop.batches] == pytest.approx([1.06, 3.0, 6.0], rel=2e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_consistent(name):
    p = preset(name)
    assert p.name == name
    assert p.base_rate in p.base_rates
    assert p.sweep_tokens <= p.tokens
    assert all(b <= p.micro_batch or b % p.micro_batch == 0 for b in p.batches), "micro-batches must fill the batch"
    assert p.byte_level == (p.size.vocabulary > 257)


def test_an_unknown_preset_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match="no 'huge'; valid are smoke, laptop, evening, workstation, paper"):
        preset("huge")
