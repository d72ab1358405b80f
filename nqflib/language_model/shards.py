"""Token files: a stream of uint16 ids in numbered shards, memory-mapped, with a manifest that says what they are.

Every shard ends with a document, so that the shards of the training stream simply follow one another, and the held-out
shard holds documents that no other shard has. The manifest is rewritten after each shard, with the place in the source
where the next one starts: a download that was cut off resumes there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nqflib.language_model.storage import DamagedFileError, read_json, write_atomically, write_json

FORMAT = 1
MANIFEST = "shards.json"
_HASHED_BELOW = 1 << 26  # bytes; larger shards are compared by length alone, unless asked

Tokens = NDArray[np.uint16]


class ShardWriter:
    """Writes shards into a folder, going on where an earlier writer with the same `recipe` stopped.

    Arguments: `recipe` is what determines the content, as JSON; `vocabulary` is V, at most 65,536. Raises `ValueError`
    if the folder holds another recipe's shards or V does not fit 16 bits.
    """

    def __init__(self, folder: Path, recipe: dict[str, Any], vocabulary: int) -> None:
        if not 1 <= vocabulary <= 1 << 16:
            raise ValueError(f"vocabulary must lie in 1 to 65536 to fit 16 bits, got {vocabulary}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "recipe": recipe,
            "vocabulary": vocabulary,
            "complete": False,
            "position": None,
            "frequencies": [0] * vocabulary,
            "shards": [],
        }
        if (folder / MANIFEST).is_file():
            found = read_json(folder / MANIFEST)
            if (found["format"], found["recipe"]) != (FORMAT, recipe):
                raise ValueError(
                    f"{folder} holds the tokens of another recipe, {found['recipe']}; choose another folder"
                )
            self.manifest = found

    @property
    def complete(self) -> bool:
        """Whether the held-out shard, the last one, is written."""
        return self.manifest["complete"]

    @property
    def position(self) -> Any:
        """The place in the source where the next shard starts, as given to `add`; None at the beginning."""
        return self.manifest["position"]

    @property
    def tokens(self) -> int:
        """Length of the training stream so far."""
        return sum(shard["tokens"] for shard in self.manifest["shards"])

    def add(self, tokens: Tokens, *, held_out: bool = False, position: Any = None) -> None:
        """Write one shard of whole documents; `held_out` makes it the last one.

        Raises `ValueError` for an id outside the vocabulary and for a shard that is added after the last.
        """
        vocabulary = self.manifest["vocabulary"]
        if self.complete:
            raise ValueError(f"{self.folder} is complete; its held-out shard was the last one")
        if tokens.size == 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"tokens must be ids below {vocabulary}, got {tokens.max(initial=0)} in {tokens.size} tokens"
            )
        file = "held_out.bin" if held_out else f"shard_{len(self.manifest['shards']):05d}.bin"
        content = np.ascontiguousarray(tokens, dtype="<u2").tobytes()
        write_atomically(self.folder / file, content)
        entry = {"file": file, "tokens": int(tokens.size), "sha256": hashlib.sha256(content).hexdigest()}
        if held_out:
            self.manifest |= {"held_out": entry, "complete": True}
        else:
            counts = np.bincount(tokens, minlength=vocabulary) + np.array(self.manifest["frequencies"])
            self.manifest |= {"shards": [*self.manifest["shards"], entry], "frequencies": counts.tolist()}
        self.manifest["position"] = position
        write_json(self.folder / MANIFEST, self.manifest)


class TokenStream:
    """The tokens of several memory-mapped shards, one after the other."""

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self.shards = list(shards)
        self.ends = np.cumsum([len(shard) for shard in shards]).tolist()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The tokens from each of `starts` on, (len(starts), length); raises `IndexError` past the end."""
        if starts.min() < 0 or starts.max() + length > len(self):
            raise IndexError(
                f"tokens {starts.min()} to {starts.max() + length} lie outside the {len(self)} of the stream"
            )
        inside = np.arange(length)
        if len(self.shards) == 1:
            return self.shards[0][starts[:, None] + inside].astype(np.int64)
        out = np.empty((len(starts), length), np.int64)
        shard_of = np.searchsorted(self.ends, starts, side="right")
        for number in np.unique(shard_of):
            shard, end = self.shards[number], self.ends[number]
            whole = (shard_of == number) & (starts + length <= end)
            out[whole] = shard[starts[whole, None] - (end - len(shard)) + inside]
            for row in np.flatnonzero((shard_of == number) & ~whole):
                out[row] = self._across(int(starts[row]), length, int(number))
        return out

    def _across(self, start: int, length: int, shard: int) -> NDArray[np.uint16]:
        """A window that begins in `shard` and ends in a later one."""
        begin, parts = start - (self.ends[shard] - len(self.shards[shard])), []
        while length:
            part = self.shards[shard][begin : begin + length]
            parts.append(part)
            length, begin, shard = length - len(part), 0, shard + 1
        return np.concatenate(parts)


def open_shards(folder: Path, *, verify: bool = False) -> tuple[TokenStream, Tokens, dict[str, Any]]:
    """The training stream, the held-out tokens, and the manifest of a complete folder.

    Arguments: `verify` hashes large shards too (a second for each GB). Raises `FileNotFoundError` for a missing or
    unfinished folder, and `DamagedFileError` naming the file that is missing, cut short, or altered.
    """
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder} holds no tokens: {MANIFEST} is missing")
    manifest = read_json(folder / MANIFEST)
    if not manifest["complete"]:
        raise FileNotFoundError(f"the tokens in {folder} are not finished; prepare the corpus again to go on")
    return (
        TokenStream([_open(folder, entry, verify) for entry in manifest["shards"]]),
        _open(folder, manifest["held_out"], verify=True),
        manifest,
    )


def _open(folder: Path, entry: dict[str, Any], verify: bool) -> Tokens:
    file, remedy = folder / entry["file"], f"delete the folder {folder} to make it anew"
    if not file.is_file():
        raise DamagedFileError(f"{file} is missing; {remedy}")
    size, expected = file.stat().st_size, 2 * entry["tokens"]
    if size != expected:
        raise DamagedFileError(f"{file} is damaged: it has {size} bytes, expected {expected}; {remedy}")
    if verify or size < _HASHED_BELOW:
        with open(file, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise DamagedFileError(f"{file} is damaged: its SHA-256 is {found}, expected {entry['sha256']}; {remedy}")
    return np.asarray(np.memmap(file, dtype="<u2", mode="r"))  # still mapped; plain arrays are faster to index
