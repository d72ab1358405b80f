"""Slopes of exact power laws, and words counted through tokens against words counted in the text."""

import re
from collections import Counter

import numpy as np
import pytest
from small_runs import write_text

from nqflib.language_model import zipf
from nqflib.language_model.corpus import load_corpus
from nqflib.language_model.zipf import rank_slope, word_counts


def test_each_piece_of_a_broken_power_law_has_its_own_slope():
    r = np.arange(1.0, 1001)
    p = np.where(r <= 30, r**-0.4, 30**0.8 * r**-1.2)
    assert rank_slope(p, 1, 30) == pytest.approx(0.4)
    assert rank_slope(p, 30, 1000) == pytest.approx(1.2)


def test_ranks_and_shares_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="1 <= first < last <= 3, got 2 and 4"):
        rank_slope([3, 2, 1], 2, 4)
    with pytest.raises(ValueError, match="falling order"):
        rank_slope([1, 2, 3], 1, 3)
    with pytest.raises(ValueError, match="positive"):
        rank_slope([1, 0.5, 0], 1, 3)


def test_words_counted_through_the_tokens_are_those_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(zipf, "_PIECE", 997)  # cuts words in two
    text = write_text(tmp_path)
    corpus = load_corpus(text, vocabulary=80, context=16, held_out=8, folder=tmp_path)
    ids = corpus.train.gather(np.array([0]), len(corpus.train))[0]
    whole = corpus.tokenizer().decode(ids.tolist())
    assert word_counts(corpus, 10**9) == Counter(re.findall(r"[a-z][a-z']*", whole.lower()))
    # A part of the tokens has a part of the words.
    assert 0 < word_counts(corpus, 2000).total() < word_counts(corpus, 4000).total()
