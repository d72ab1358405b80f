"""The data files are what the manifest and the README say, damage is refused, and the cleaning is exact."""

import hashlib
import importlib.util
import io
import json
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nqflib import data

REPOSITORY = Path(__file__).resolve().parent.parent
STORED = REPOSITORY / "data"


@pytest.fixture(scope="module")
def corpora():
    return {name: data.load_documents(name) for name in ("sotu", "austen")}


@pytest.fixture(scope="module")
def make():
    """data/make.py, which is a script and not part of the package."""
    return _module("make_data", STORED / "make.py")


@pytest.fixture
def copy(tmp_path):
    for file in ("manifest.json", "sotu.jsonl.xz", "austen.jsonl.xz", "mnist.npz"):
        shutil.copy(STORED / file, tmp_path)
    return tmp_path


def _module(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def _alter(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


# --- the files ------------------------------------------------------------------------------------


def test_manifest_describes_the_files():
    manifest = json.loads((STORED / "manifest.json").read_text())
    assert data.names() == ("austen", "mnist", "sotu")
    for name, entry in manifest.items():
        content = (STORED / entry["file"]).read_bytes()
        assert data.path(name) == STORED / entry["file"]
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])


def test_manifest_describes_the_unpacked_content(corpora):
    manifest = json.loads((STORED / "manifest.json").read_text())
    for name, documents in corpora.items():
        content = lzma.decompress((STORED / manifest[name]["file"]).read_bytes())
        assert hashlib.sha256(content).hexdigest() == manifest[name]["content_sha256"]
        assert len(documents) == manifest[name]["documents"]
        assert sum(len(document.text) for document in documents) == manifest[name]["characters"]
    images, labels = data.load_mnist()
    content = images.tobytes() + labels.astype(np.uint8).tobytes()
    assert hashlib.sha256(content).hexdigest() == manifest["mnist"]["content_sha256"]


def test_readme_states_the_numbers_of_the_manifest():
    readme = (STORED / "README.md").read_text("utf-8")
    for entry in json.loads((STORED / "manifest.json").read_text()).values():
        assert f"`{entry['file']}` | `{entry['sha256']}`" in readme
        assert f"{entry['bytes']:,} bytes" in readme
        assert f"{entry.get('characters', 5000):,}" in readme


def test_text_files_are_about_three_and_a_half_megabytes():
    assert sum(data.path(name).stat().st_size for name in ("sotu", "austen")) < 3_700_000


# --- the texts ------------------------------------------------------------------------------------


def test_every_character_is_ascii_and_common(corpora):
    counts = Counter()
    for documents in corpora.values():
        for document in documents:
            counts.update(document.text)
    assert all(c == "\n" or (c.isascii() and c.isprintable()) for c in counts)
    assert min(counts.values()) >= 200
    assert len(counts) == 75


def test_documents_are_separable_from_the_whole_text(corpora):
    for name, documents in corpora.items():
        texts = data.load_text(name).split(data.DOCUMENT_SEPARATOR)
        assert texts == [document.text for document in documents]


def test_paragraphs_have_single_spaces_and_no_hard_line_breaks(corpora):
    for documents in corpora.values():
        for document in documents:
            assert document.text == document.text.strip()
            assert "  " not in document.text
            assert " \n" not in document.text
    for novel in corpora["austen"]:
        lengths = [len(paragraph) for paragraph in novel.text.split("\n")]
        assert 1000 < len(lengths) < 2500
        assert np.mean(lengths) > 300  # wrapped lines of the source have at most 75 characters


def test_233_addresses_from_1790_to_2021(corpora):
    addresses = corpora["sotu"]
    years = Counter(address.year for address in addresses)
    assert len(addresses) == 233
    assert set(range(1790, 2022)) - set(years) == {1933}
    assert {year for year, n in years.items() if n > 1} == {1953, 1961}
    assert [a.year for a in addresses] == sorted(a.year for a in addresses)
    assert [a.author for a in addresses if a.year == 1961] == ["Dwight D Eisenhower", "John F Kennedy"]
    assert len({address.author for address in addresses}) == 43
    assert Counter(a.author for a in addresses)["Abraham Lincoln"] == 4


def test_six_novels_in_order_of_publication(corpora):
    assert [(novel.title, novel.year) for novel in corpora["austen"]] == [
        ("Sense and Sensibility", 1811),
        ("Pride and Prejudice", 1813),
        ("Mansfield Park", 1814),
        ("Emma", 1815),
        ("Northanger Abbey", 1817),
        ("Persuasion", 1817),
    ]


def test_famous_sentences_are_in_their_documents(corpora):
    text = {(d.author, d.year, d.title): d.text for documents in corpora.values() for d in documents}
    lincoln = text["Abraham Lincoln", 1862, "State of the Union 1862"]
    assert "The fiery trial through which we pass will light us down in honor or dishonor" in lincoln
    roosevelt = text["Franklin D Roosevelt", 1941, "State of the Union 1941"]
    assert "a world founded upon four essential human freedoms" in roosevelt
    pride = text["Jane Austen", 1813, "Pride and Prejudice"]
    assert pride.startswith(
        "Chapter 1\nIt is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.\nHowever little known"
    )


def test_novels_end_with_their_own_last_words_and_not_with_an_editor(corpora):
    endings = [novel.text[-60:] for novel in corpora["austen"]]
    assert endings[1].endswith("had been the means of uniting them.")
    assert endings[3].endswith("in the perfect happiness of the union.\nFINIS")
    assert endings[5].endswith("than in its national importance.\nFinis")
    whole = data.load_text("austen")
    for foreign in ("Signet", "Gutenberg", "first and second editions", "End volume", "By Jane Austen", "_"):
        assert foreign not in whole


# --- the digits -----------------------------------------------------------------------------------


def test_digits_are_balanced_in_every_prefix_of_tens():
    images, labels = data.load_mnist()
    assert (images.shape, images.dtype) == ((5000, 28, 28), np.uint8)
    assert (labels.shape, labels.dtype) == ((5000,), np.int64)
    assert np.array_equal(labels, np.arange(5000) % 10)


def test_digits_use_all_grey_levels_and_differ_from_each_other():
    images, _ = data.load_mnist()
    assert np.array_equal(np.unique(images), np.arange(256))
    assert len({image.tobytes() for image in images}) == 5000


def test_labels_belong_to_the_images():
    # The nearest class mean recognises about four of five MNIST digits; one of ten if labels were shuffled.
    images, labels = data.load_mnist()
    flat = images.reshape(5000, -1) / 255
    means = np.stack([flat[:4000][labels[:4000] == digit].mean(0) for digit in range(10)])
    nearest = (-2 * flat[4000:] @ means.T + (means**2).sum(1)).argmin(1)
    assert 0.75 < np.mean(nearest == labels[4000:]) < 0.9


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("sotu", data.load_text),
        ("austen", data.load_documents),
        ("mnist", lambda name, folder: data.load_mnist(folder=folder)),
    ],
)
def test_one_flipped_bit_anywhere_is_refused(copy, name, load):
    file = data.path(name, folder=copy)
    load(name, folder=copy)
    size = file.stat().st_size
    for position in (0, size // 2, size - 1):
        _alter(file, position)
        with pytest.raises(data.DamagedDataError, match=f"{file.name} is damaged.*make.py"):
            load(name, folder=copy)
        _alter(file, position)
    load(name, folder=copy)


@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_truncated_file_is_refused_with_both_sizes(copy, keep):
    file = copy / "sotu.jsonl.xz"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    message = rf"has {len(content[:keep])} bytes .* expected {len(content)} bytes .*git checkout -- .*sotu"
    with pytest.raises(data.DamagedDataError, match=message):
        data.path("sotu", folder=copy)
    assert data.path("austen", folder=copy).exists()  # the others are still good


def test_missing_file_and_damaged_manifest_are_named(copy):
    (copy / "mnist.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"mnist\.npz is missing.*make.py"):
        data.load_mnist(folder=copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(data.DamagedDataError, match=r"manifest\.json is damaged"):
        data.path("sotu", folder=copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json is missing"):
        data.path("sotu", folder=copy)


def test_unknown_name_lists_the_known_ones_and_suggests():
    with pytest.raises(ValueError, match=r"'sotuu'; valid names are austen, mnist, sotu; did you mean 'sotu'"):
        data.path("sotuu")
    with pytest.raises(ValueError, match=r"'wikitext'; valid names are austen, mnist, sotu$"):
        data.load_text("wikitext")


def test_images_are_not_text():
    with pytest.raises(ValueError, match=r"'mnist' holds images"):
        data.load_text("mnist")


def test_pickled_arrays_are_refused_even_with_a_matching_hash(copy):
    np.savez(copy / "mnist.npz", images=np.array([{}], dtype=object), labels=np.zeros(1))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["mnist"]["sha256"] = hashlib.sha256((copy / "mnist.npz").read_bytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="allow_pickle"):
        data.load_mnist(folder=copy)


# --- where the files are --------------------------------------------------------------------------


def test_checkout_and_installed_package_find_their_own_folder(tmp_path):
    package, beside = tmp_path / "nqflib", tmp_path / "data"
    package.mkdir()
    shutil.copy(REPOSITORY / "nqflib" / "data.py", package)
    installed = _module("data_elsewhere", package / "data.py")
    with pytest.raises(FileNotFoundError, match=r"neither .*_data nor .*pip install.*data/make\.py"):
        installed.path("austen")
    shutil.copytree(STORED, beside)
    assert installed.path("austen") == beside / "austen.jsonl.xz"
    shutil.copytree(STORED, package / "_data")
    assert installed.path("austen") == package / "_data" / "austen.jsonl.xz"
    _alter(package / "_data" / "austen.jsonl.xz", 7)
    with pytest.raises(installed.DamagedDataError, match="reinstall the package"):
        installed.load_text("austen")


def test_reading_data_does_not_import_torch():
    code = "import sys; from nqflib import data; data.load_mnist(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


# --- make.py --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("\u201cWe\u2019re here,\u201d \u2014 naïve Nicolás", '"We\'re here," -- naive Nicolas'),
        ("great\u2011grand \u2013- and", "great-grand -- and"),
        ("the &quot;National Guard,&quot; paid&mdash;better", 'the "National Guard," paid--better'),
        ("4 1/2 per cent; 4 1\x02 per cent; 9/11", "4 1-2 per cent; 4 1-2 per cent; 9-11"),
        ("4.5% stock, 83 % of 1928", "4.5 percent stock, 83 percent of 1928"),
        ("R&D at Alsop & Co., hours, &c., and", "R and D at Alsop and Co., hours, etc., and"),
        ("the parallel of 49° and her £20,000, any", "the parallel of 49 degrees and her 20,000 pounds, any"),
        ("between _them_ `mercy'", "between them 'mercy'"),
        ("at our borders.For that reason, U.S. Government", "at our borders. For that reason, U.S. Government"),
    ],
)
def test_folding_keeps_what_is_said(make, text, folded):
    assert make.fold(text) == folded


@pytest.mark.parametrize("character", ["\u20ac", "\u00bd", "\x07", "\t", "\u6f22"])
def test_folding_refuses_what_it_has_no_rule_for(make, character):
    with pytest.raises(ValueError, match="no folding rule"):
        make.fold(f"price {character} 5")


def test_rare_characters_are_dropped_and_rare_capitals_written_small(make):
    texts = ["q" * 5 + " Quart * of + zest", "q z Z" + "." * 3]
    kept, rare = make.drop_rare(texts, minimum=5)
    #  common: q (6) and the space (7); z and Z are both rare, so Z has no common small form
    assert kept == ["qqqqq q", "q"]
    assert rare["Q"] == 1
    assert rare["Z"] == 1
    assert rare["z"] == 2
    assert "q" not in rare


def test_threshold_is_on_all_texts_together(make):
    kept, rare = make.drop_rare(["a" * 120 + "b" * 199, "a" * 80])
    assert kept == ["a" * 120, "a" * 80]
    assert rare == {"b": 199}


def test_unwrapping_joins_lines_and_keeps_paragraphs(make):
    lines = ["One line", "of two", "", "  ", "her own--", '"Very', "brother-", "in-law", "", "* * *", "", "end"]
    assert make.unwrap(lines) == 'One line of two\nher own--"Very brother-in-law\n* * *\nend'


def test_grey_levels_are_recovered_from_three_decimals(make):
    levels = np.arange(256)
    assert np.array_equal(make.grey_levels(np.round(levels / 255, 3)), levels)
    with pytest.raises(ValueError, match="grey levels"):
        make.grey_levels(np.array([0.5, 0.5005]))


def _serialised(strings):
    """R's binary serialisation (version 3) of a character vector, by its published layout."""
    head = b"X\n" + struct.pack(">4i5s2i", 3, 0x40201, 0x30500, 5, b"UTF-8", 16, len(strings))
    return head + b"".join(struct.pack(">2i", 0x40009, len(s.encode())) + s.encode() for s in strings)


def _database(*objects):
    return b"".join(struct.pack(">I", len(o)) + zlib.compress(o) for o in objects)


def test_r_database_is_read_record_by_record(make):
    vectors = [["EMMA", "", "naïve £5"], ["Persuasion"]]
    database = _database(*map(_serialised, vectors))
    assert [make.character_vector(record) for record in make.records(database)] == vectors
    with pytest.raises(ValueError, match="cut short"):
        list(make.records(database[:-3]))


def test_r_objects_of_another_kind_are_refused(make):
    vector = _serialised(["a", "b"])
    with pytest.raises(ValueError, match="binary serialisation"):
        make.character_vector(b"A\n" + vector[2:])
    with pytest.raises(ValueError, match="character vector"):
        make.character_vector(vector.replace(struct.pack(">i", 16), struct.pack(">i", 13)))
    missing = vector.replace(struct.pack(">2i", 0x40009, 1) + b"b", struct.pack(">2i", 9, -1))
    with pytest.raises(ValueError, match="string 1"):
        make.character_vector(missing)


def test_addresses_are_read_in_order_of_time(make):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for file, year, name in [
            ("1953_dwight_d_eisenhower_r", 1953, "Dwight D Eisenhower"),
            ("1953_harry_s_truman_d", 1953, "Harry S Truman"),
            ("1897_william_mc_kinley_r", 1897, "William Mc Kinley"),
        ]:
            content = json.dumps({"year": year, "name": name, "party": "", "text": " Thank  you. "}).encode()
            info = tarfile.TarInfo(f"package/data/{file}.json")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    documents = make.read_sotu(archive.getvalue())
    assert [d["author"] for d in documents] == ["William McKinley", "Harry S Truman", "Dwight D Eisenhower"]
    assert documents[0]["title"] == "State of the Union 1897"
    assert documents[0]["text"] == "Thank you."


def test_packed_arrays_have_the_same_bytes_and_read_back(make):
    arrays = {"labels": np.arange(3, dtype=np.uint8), "images": np.arange(12, dtype=np.uint8).reshape(3, 2, 2)}
    packed = make.pack_arrays(arrays)
    assert packed == make.pack_arrays(dict(reversed(arrays.items())))
    with np.load(io.BytesIO(packed), allow_pickle=False) as read:
        assert all(np.array_equal(read[name], array) for name, array in arrays.items())


def test_comparison_tells_repacked_from_different(make, capsys):
    entry = {"file": "x.xz", "sha256": "1", "content_sha256": "2"}
    assert make.compare({"x": entry}, {"x": entry}) == 0
    assert make.compare({"x": entry}, {"x": entry | {"sha256": "9"}}) == 0
    assert make.compare({"x": entry}, {"x": entry | {"sha256": "9", "content_sha256": "8"}}) == 1
    assert make.compare({"x": entry}, {}) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split()[0] for line in printed] == ["identical", "same", "DIFFERENT", "DIFFERENT"]


def test_archive_with_another_hash_is_refused(make, tmp_path):
    (tmp_path / make.ARCHIVES["sotu"].file).write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"datasets-sotu.* has SHA-256 .*, expected ab03"):
        make.fetch(tmp_path)
