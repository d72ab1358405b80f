"""The text of the language model as windows of tokens: shipped, one's own, or streamed from FineWeb-Edu.

    >>> corpus = load_corpus(Shipped(), vocabulary=256, context=64)        # doctest: +SKIP
    >>> corpus.batch(7, size=32, seed=0).shape                             # doctest: +SKIP
    torch.Size([32, 65])

A window is `context` + 1 tokens, the last of which is only predicted. Windows do not overlap and are shuffled anew in
every epoch; batch i is a pure function of (seed, i), and runs that differ in the batch size alone see the same windows
in the same order. Held-out windows come from documents that training never sees. Tokens are cached by the hash of
everything that determines them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nqflib import data
from nqflib.language_model import fineweb
from nqflib.language_model.fineweb import FineWeb
from nqflib.language_model.shards import ShardWriter, Tokens, TokenStream, open_shards
from nqflib.language_model.storage import (
    cache_folder,
    content_key,
    locked,
    read_json,
    write_atomically,
    write_json,
)
from nqflib.language_model.tokenizer import VERSION, encode, fold, train_tokenizer
from nqflib.progress import progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
REPLACED = "replaced.json"
HELD_OUT_EVERY = 9
# Every ninth document from the fourth on: 26 addresses and one novel, a quarter of the held-out text as of the whole,
# and none of the addresses that repeat another one's pages (1867 and 1868, 1875 and 1897, 1905 and 1906 and 1907).
HELD_OUT_FIRST = 3


@dataclass(frozen=True)
class Shipped:
    """The shipped corpora `names`; `every` k-th document of each only, which makes a small text for tests."""

    names: tuple[str, ...] = ("sotu", "austen")
    every: int = 1


@dataclass(frozen=True)
class OwnText:
    """A user's UTF-8 text files, one document each, folded to the shipped alphabet unless `byte_level`."""

    files: tuple[str, ...]


Source = Shipped | OwnText | FineWeb


@dataclass(frozen=True)
class Corpus:
    """Tokens ready for training.

    Fields: `vocabulary` V; `context` T; `train`, the training stream; `held_out` (n, T + 1) int64; `frequencies` (V,),
    how often each token occurs in the training stream; `digest` of all this; `replaced`, how often folding changed each
    character of one's own text; `folder`, where the tokens and `tokenizer.json` are.
    """

    vocabulary: int
    context: int
    train: TokenStream
    held_out: Tensor
    frequencies: NDArray[np.int64]
    digest: str
    replaced: dict[str, int]
    folder: Path

    @property
    def windows(self) -> int:
        """Number of windows in an epoch."""
        return (len(self.train) - 1) // self.context

    def batch(self, i: int, size: int, seed: int) -> Tensor:
        """Batch i of `size` windows, (size, T + 1) int64: windows i size to (i + 1) size of all epochs in a row."""
        positions = np.arange(i * size, (i + 1) * size)
        epochs = positions // self.windows
        orders = [_order(seed, epoch, self.windows) for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)]
        order = np.concatenate([o[positions[epochs == e] % self.windows] for e, o in enumerate(orders, int(epochs[0]))])
        return torch.from_numpy(self.train.gather(order * self.context, self.context + 1))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, for turning ids into text."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / TOKENIZER))


def unigram_entropy(tokens: Tensor | NDArray[Any], vocabulary: int) -> float:
    """-sum_k p_k ln p_k in nats, with p_k the share of token k among `tokens`: the best loss without any context."""
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=vocabulary)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def pair_loss(corpus: Corpus) -> float:
    """Held-out loss, in nats, of a table of pairs counted on the training stream: what one token of context can do.

    -mean ln p(next | token) with p(b | a) = (n_ab + 1/2) / (n_a + V/2).
    """
    V, piece = corpus.vocabulary, 1 << 20
    counts = np.zeros(V * V)
    for start in range(0, len(corpus.train) - 1, piece):
        length = min(piece, len(corpus.train) - 1 - start) + 1  # pieces share a token, so that no pair is lost
        ids = corpus.train.gather(np.array([start]), length)[0]
        counts += np.bincount(ids[:-1] * V + ids[1:], minlength=V * V)
    table = counts.reshape(V, V) + 0.5
    windows = corpus.held_out.numpy()
    first, second = windows[:, :-1], windows[:, 1:]
    return float(-np.mean(np.log(table[first, second] / table.sum(1)[first])))


def load_corpus(
    source: Source,
    *,
    vocabulary: int,
    context: int,
    byte_level: bool = False,
    held_out: int = 128,
    folder: Path | None = None,
) -> Corpus:
    """Tokenise a source, once, and open it.

    Arguments: `vocabulary` V, `byte_level` as for `train_tokenizer`; `context` T tokens a window; `held_out`, how many
    held-out windows, spread evenly over the held-out documents; `folder` for caches (default: `cache_folder()`).
    Raises `ValueError` for a text that is too short or cannot be written in V ids, `FileNotFoundError`, and
    `DamagedFileError` for a cache that is not what was written.
    """
    if context < 1 or held_out < 1:
        raise ValueError(f"context and held_out must be at least 1, got {context} and {held_out}")
    recipe = _recipe(source, vocabulary, byte_level)
    cache = (folder or cache_folder()) / "tokens" / content_key(recipe)
    with locked(cache):
        writer = ShardWriter(cache, recipe, vocabulary)
        if not writer.complete:
            if isinstance(source, FineWeb):
                fineweb.prepare(source, writer, cache / TOKENIZER, vocabulary)
            else:
                _prepare(source, writer, vocabulary, byte_level)
    train, held, manifest = open_shards(cache)
    name = ", ".join(source.files) if isinstance(source, OwnText) else type(source).__name__
    windows = _held_out_windows(held, context, held_out, name)
    if len(train) <= context:
        raise ValueError(f"{name}: {len(train)} training tokens are shorter than one window of {context} + 1")
    shards = [shard["sha256"] for shard in manifest["shards"]]
    digest = content_key({"shards": shards, "windows": _hash(windows), "context": context, "vocabulary": vocabulary})
    return Corpus(
        vocabulary,
        context,
        train,
        torch.from_numpy(windows),
        np.array(manifest["frequencies"], np.int64),
        digest,
        read_json(cache / REPLACED) if isinstance(source, OwnText) else {},
        cache,
    )


def _recipe(source: Source, vocabulary: int, byte_level: bool) -> dict[str, Any]:
    """Everything that determines the tokens."""
    recipe: dict[str, Any] = {
        "source": type(source).__name__,
        **asdict(source),
        "vocabulary": vocabulary,
        "byte_level": byte_level or isinstance(source, FineWeb),
        "tokenizer": [VERSION, metadata.version("tokenizers")],
    }
    if isinstance(source, Shipped):
        recipe["sha256"] = [hashlib.sha256(data.path(name).read_bytes()).hexdigest() for name in source.names]
    if isinstance(source, OwnText):
        if not source.files:
            raise ValueError("files: name at least one text file")
        recipe["files"] = [Path(file).name for file in source.files]
        recipe["sha256"] = [hashlib.sha256(_read(file).encode()).hexdigest() for file in source.files]
    return json.loads(json.dumps(recipe))  # tuples become lists, as they are when read back


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error


def split_documents(texts: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents: every ninth from the fourth on is held out.

    With fewer than four documents the last ninth of the longest is cut off, between two words, and held out.
    """
    held_out = texts[HELD_OUT_FIRST::HELD_OUT_EVERY]
    if held_out:
        return [t for i, t in enumerate(texts) if i % HELD_OUT_EVERY != HELD_OUT_FIRST], held_out
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    text = texts[longest]
    cut = len(text) - len(text) // HELD_OUT_EVERY
    space = text.rfind(" ", 0, cut)
    cut = space if space > 0 else cut
    return [*texts[:longest], text[:cut], *texts[longest + 1 :]], [text[cut:].lstrip()]


def _prepare(source: Shipped | OwnText, writer: ShardWriter, vocabulary: int, byte_level: bool) -> None:
    if isinstance(source, Shipped):
        texts = [d.text for name in source.names for d in data.load_documents(name)[:: source.every]]
    else:
        read = {file: _read(file) for file in source.files}
        folded = {} if byte_level else {file: fold(text, file) for file, text in read.items()}
        write_json(writer.folder / REPLACED, sum((f.replaced for f in folded.values()), start=Counter[str]()))
        texts = list(read.values() if byte_level else (f.text for f in folded.values()))
    training, held_out = split_documents(texts)
    # The held-out documents are among the tokenizer's texts: a character that only they have would have no id.
    tokenizer = train_tokenizer([*training, *held_out], vocabulary, byte_level=byte_level)
    write_atomically(writer.folder / TOKENIZER, tokenizer.to_str().encode())
    if writer.tokens == 0:
        documents = progress(encode(tokenizer, training), "encoding text", total=len(training))
        writer.add(_join(documents))
    writer.add(_join(encode(tokenizer, held_out)), held_out=True)


def _join(documents: Iterator[Tokens]) -> Tokens:
    return np.concatenate(list(documents))


def _held_out_windows(tokens: Tokens, context: int, count: int, name: str) -> NDArray[np.int64]:
    """`count` windows that do not overlap, spread evenly over the held-out tokens; (count, T + 1)."""
    available = (len(tokens) - 1) // context
    if available < count:
        raise ValueError(
            f"{name}: the held-out text has {len(tokens)} tokens, room for {max(available, 0)} windows of "
            f"{context} + 1, but {count} were asked for (held_out); give more text or ask for fewer"
        )
    starts = np.arange(count) * available // count * context
    return np.asarray(tokens[starts[:, None] + np.arange(context + 1)], dtype=np.int64)


def _hash(windows: NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows, "<i8").tobytes()).hexdigest()


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def _order(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    """The order of the windows in one epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(windows)
