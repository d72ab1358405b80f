"""Frequencies against rank: slopes, and the words behind the tokens.

Zipf's law says p_r ~ r^-s with s near 1 for words; the paper's law for the head of the spectrum takes the sorted
probabilities of tokens, whatever their shape (Meterez et al. 2026).
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import ArrayLike

from nqflib.language_model.corpus import Corpus

_POINTS = 40  # of a fit, evenly spaced in ln r, so that the many high ranks do not outweigh the few low ones
_PIECE = 100_000  # tokens decoded at a time


def rank_slope(shares: ArrayLike, first: int, last: int) -> float:
    """The exponent s of p_r ~ r^-s between two ranks, by least squares of logarithms.

        >>> round(rank_slope(1 / np.arange(1.0, 101) ** 0.7, 2, 50), 6)
        0.7

    Args:
        shares: (n,), positive, in falling order.
        first, last: ranks from 1; 1 <= first < last <= n.

    Raises:
        ValueError: ranks outside of the curve, or shares that rise or are not positive.
    """
    p = np.asarray(shares, dtype=np.float64)
    if not 1 <= first < last <= p.size:
        raise ValueError(f"first and last must satisfy 1 <= first < last <= {p.size}, got {first} and {last}")
    if (np.diff(p) > 0).any() or p[-1] <= 0:
        raise ValueError("shares must be positive and in falling order")
    ranks = np.unique(np.round(np.geomspace(first, last, _POINTS)).astype(int))
    return float(-np.polyfit(np.log(ranks), np.log(p[ranks - 1]), 1)[0])


def word_counts(corpus: Corpus, tokens: int) -> Counter[str]:
    """How often each word, a run of letters and apostrophes in small letters, occurs in the first `tokens` tokens."""
    tokenizer = corpus.tokenizer()
    counts: Counter[str] = Counter()
    rest = ""
    end = min(tokens, len(corpus.train))
    for start in range(0, end, _PIECE):
        ids = corpus.train.gather(np.array([start]), min(_PIECE, end - start))[0]
        text = rest + tokenizer.decode(ids.tolist(), skip_special_tokens=False).replace("<eot>", "\n").lower()
        cut = max(text.rfind(" "), text.rfind("\n")) + 1  # a word may reach into the next piece
        counts.update(re.findall(r"[a-z][a-z']*", text[:cut]))
        rest = text[cut:]
    counts.update(re.findall(r"[a-z][a-z']*", rest))
    return counts
