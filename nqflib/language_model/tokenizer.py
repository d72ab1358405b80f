"""Byte-pair encoding of the corpora, with as few rare tokens as a small vocabulary allows.

A byte alphabet takes 256 ids before the first merge, so that small vocabularies start from the characters of the text
instead; what has a plain spelling is folded to it first. Digits stand alone, words take the space before them, and id 0
is `<eot>`, which ends every document. Rare tokens are kept away on purpose: an adaptive optimizer has almost no second
moment for them, and the curvature preconditioned by it explodes.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the package costs a third of a second, which a cached corpus never needs
    from tokenizers import Tokenizer

END_OF_TEXT = "<eot>"
END_ID = 0
VERSION = 1  # of the rules below; a new one makes every cached corpus anew
# The 75 characters of the shipped corpus; Q, X and Z are too rare in it and are written small.
ALPHABET = "\n !\"$'(),-.0123456789:;?ABCDEFGHIJKLMNOPRSTUVWY[]abcdefghijklmnopqrstuvwxyz"
FOREIGN_LIMIT = 0.1  # beyond this share of characters without an equal the text is refused
BYTE_ALPHABET = 256

_WORDS = r" ?[A-Za-z]+|[0-9]| ?[^ A-Za-z0-9\n]+|\s"
_SPELLED_OUT = {
    **dict.fromkeys("‘’`´", "'"),
    **dict.fromkeys("“”«»", '"'),
    **dict.fromkeys("‐‑‒–/", "-"),
    **{"—": "--", "…": "...", "%": " percent", "&": " and ", "°": " degrees", "£": " pounds ", "\t": " "},
    **{"Q": "q", "X": "x", "Z": "z", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ß": "ss", "{": "(", "}": ")"},
}
_SLICE = 100_000  # characters encoded at a time: a whole corpus at once takes 3 GB
_BATCH = 64


class Folded(NamedTuple):
    """A text in the corpus's alphabet, and how often each character was replaced."""

    text: str
    replaced: Counter[str]


def fold(text: str, name: str = "text") -> Folded:
    """Write `text` in the 75 characters of the corpus: accents off, signs spelled out, what has no equal left out.

    One space between words, one newline between paragraphs, as in the shipped texts. Raises `ValueError`, with the
    commonest offenders, if more than a tenth of the characters have no equal: such a text wants a byte alphabet.
    """
    text = unicodedata.normalize("NFC", text)
    text = text.replace("\r", "")
    replaced = Counter({c: n for c, n in Counter(text).items() if c not in ALPHABET})
    table = {character: _plain(character) for character in replaced}
    foreign = Counter({c: n for c, n in replaced.items() if not table[c]})
    if foreign.total() > FOREIGN_LIMIT * max(len(text), 1):
        worst = ", ".join(f"{c!r} ({n})" for c, n in foreign.most_common(5))
        raise ValueError(
            f"{name}: {foreign.total()} of {len(text)} characters have no equal in the corpus's alphabet, most often "
            f"{worst}; a vocabulary over bytes (byte_level, at least {BYTE_ALPHABET + 1} ids) takes any text"
        )
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.translate(str.maketrans(table)).split("\n"))
    return Folded("\n".join(paragraph for paragraph in paragraphs if paragraph), replaced)


def _plain(character: str) -> str:
    """The character in the alphabet, the empty string if nothing there is like it."""
    plain = "".join(_SPELLED_OUT.get(c, c) for c in unicodedata.normalize("NFKD", character))
    plain = "".join(_SPELLED_OUT.get(c, c) for c in plain if not unicodedata.combining(c))
    return plain if all(c in ALPHABET for c in plain) else ""


def train_tokenizer(texts: Iterable[str], vocabulary: int, *, byte_level: bool = False) -> Tokenizer:
    """A byte-pair encoding with exactly `vocabulary` ids, learned from `texts`.

    Arguments: `byte_level` starts from all 256 bytes and takes any text; else from the characters that occur. Raises
    `ValueError` if the alphabet leaves no room for merges, or the text is too small to fill the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if byte_level:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        texts = list(texts)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        tokenizer.decoder = decoders.Fuse()
        alphabet = sorted(set().union(*texts))
    if vocabulary <= len(alphabet) + 1:
        raise ValueError(
            f"vocabulary must exceed {len(alphabet) + 1}, the {len(alphabet)} "
            f"{'bytes' if byte_level else 'characters of the text'} and {END_OF_TEXT}; got {vocabulary}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _slices(text)), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"vocabulary: the text has merges for {tokenizer.get_vocab_size()} ids only, {vocabulary} were asked for"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[NDArray[np.uint16]]:
    """The ids of each text, ended by `<eot>`, encoded in slices so that memory stays below 200 MB."""
    pieces = ((number, piece) for number, text in enumerate(texts) for piece in _slices(text))
    current, parts = 0, []
    while batch := list(islice(pieces, _BATCH)):
        encodings = tokenizer.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            if number != current:
                yield np.concatenate([*parts, np.array([END_ID], np.uint16)])
                current, parts = number, []
            parts.append(np.array(encoding.ids, np.uint16))
    if parts:
        yield np.concatenate([*parts, np.array([END_ID], np.uint16)])


def _slices(text: str) -> Iterator[str]:
    """Cut between two words, where no token can reach across; a text without such a place stays whole."""
    start = 0
    while len(text) - start > _SLICE:
        cut = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])").search(text, start + _SLICE)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]
