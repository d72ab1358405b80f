"""FineWeb-Edu, or any set of texts that the `datasets` package can stream, as token shards.

The stream is read once from front to back: its first documents train the tokenizer, then every document is encoded,
shards are written as they fill up, and the last shard is held out. The manifest keeps the stream's own state after each
shard, so that a download that was cut off goes on in the middle. Source: Penedo et al. 2024 (FineWeb-Edu, ODC-By 1.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nqflib.language_model.shards import ShardWriter
from nqflib.language_model.storage import write_atomically
from nqflib.language_model.tokenizer import encode, train_tokenizer
from nqflib.progress import progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DOCUMENTS_AT_A_TIME = 256


@dataclass(frozen=True)
class FineWeb:
    """A streamed set of texts.

    Fields: `tokens` to train on, and `held_out_tokens` after them; `path` and `name` as `datasets.load_dataset` takes
    them, a folder of parquet or jsonl files included; `column` that holds the text; `shard_tokens` a file;
    `tokenizer_documents`, how many of the first documents the tokenizer learns from.
    """

    tokens: int
    held_out_tokens: int = 10_000_000
    path: str = "HuggingFaceFW/fineweb-edu"
    name: str | None = "sample-100BT"
    column: str = "text"
    shard_tokens: int = 100_000_000
    tokenizer_documents: int = 200_000


def prepare(source: FineWeb, writer: ShardWriter, tokenizer_file: Path, vocabulary: int) -> None:
    """Write the shards of `source`, going on where `writer` stopped, and its tokenizer.

    Raises `ConnectionError` if the texts cannot be reached, `ValueError` if they have no column of that name or end
    before the tokens are complete.
    """
    tokenizer = _tokenizer(source, tokenizer_file, vocabulary)
    stream = _stream(source)
    if writer.position is not None:
        stream.load_state_dict(writer.position)
    rows = iter(stream)
    left = max(-(-(source.tokens - writer.tokens) // source.shard_tokens), 0)
    for number in progress(range(left + 1), "streaming text"):
        held_out = number == left
        wanted = source.held_out_tokens if held_out else min(source.shard_tokens, source.tokens - writer.tokens)
        if wanted <= 0:  # documents are whole, so that earlier shards may have held a little more than was asked
            continue
        tokens = _read_tokens(rows, tokenizer, source, wanted)
        if len(tokens) < wanted:
            part = "held-out" if held_out else "training"
            raise ValueError(
                f"{source.path} ended when a {part} shard lacked {wanted - len(tokens)} tokens; {writer.tokens} of "
                f"{source.tokens} training tokens are written; ask for fewer"
            )
        writer.add(tokens, held_out=held_out, position=stream.state_dict())


def _read_tokens(rows: Iterator[Any], tokenizer: Tokenizer, source: FineWeb, wanted: int) -> NDArray[np.uint16]:
    """At least `wanted` tokens of whole documents; a few hundred documents are encoded at a time."""
    parts: list[NDArray[np.uint16]] = []
    have = 0
    while have < wanted:
        batch = [_text(row, source) for row in islice(rows, _DOCUMENTS_AT_A_TIME)]
        if not batch:
            break
        parts.extend(encode(tokenizer, batch))
        have = sum(map(len, parts))
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def _tokenizer(source: FineWeb, file: Path, vocabulary: int) -> Tokenizer:
    from tokenizers import Tokenizer

    if not file.is_file():
        texts: Iterator[str] = (_text(row, source) for row in _stream(source).take(source.tokenizer_documents))
        trained = train_tokenizer(texts, vocabulary, byte_level=True)
        write_atomically(file, trained.to_str().encode())
    return Tokenizer.from_file(str(file))


def _stream(source: FineWeb) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("streaming a corpus needs the package datasets: pip install 'nqflib[lm]'") from error
    try:
        return datasets.load_dataset(source.path, name=source.name, split="train", streaming=True)
    except (OSError, ValueError) as error:  # offline, no such folder, no such name
        raise ConnectionError(f"cannot reach the texts {source.path!r} ({source.name}): {error}") from error


def _text(row: dict[str, Any], source: FineWeb) -> str:
    if source.column not in row:
        raise ValueError(f"{source.path} has no column {source.column!r}; it has {', '.join(row)}")
    return row[source.column]
