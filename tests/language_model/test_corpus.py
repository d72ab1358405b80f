"""Tokens, windows and held-out text: nothing lost, nothing shared, nothing silently damaged."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nqflib import data
from nqflib.language_model import corpus as module
from nqflib.language_model import fineweb
from nqflib.language_model.corpus import OwnText, Shipped, load_corpus, pair_loss, split_documents, unigram_entropy
from nqflib.language_model.fineweb import FineWeb
from nqflib.language_model.shards import MANIFEST, ShardWriter, TokenStream, open_shards
from nqflib.language_model.storage import DamagedFileError
from nqflib.language_model.tokenizer import ALPHABET, END_ID, encode, fold, train_tokenizer

SMALL = Shipped(names=("sotu",), every=24)
SETTINGS = {"vocabulary": 128, "context": 32, "held_out": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small(folder):
    return load_corpus(SMALL, **SETTINGS, folder=folder)


def decoded(corpus, ids):
    """The documents that a run of ids spells."""
    parts = np.split(ids, np.flatnonzero(ids == END_ID) + 1)
    assert parts[-1].size == 0, "a stream ends with <eot>"
    return [corpus.tokenizer().decode(part[:-1].tolist()) for part in parts[:-1]]


def test_training_and_held_out_tokens_spell_the_documents_and_share_none(small):
    texts = [document.text for document in data.load_documents("sotu")[::24]]
    training, held_out = split_documents(texts)
    stream, held, _ = open_shards(small.folder)
    assert decoded(small, stream.shards[0]) == training
    assert decoded(small, held) == held_out
    assert held_out == [texts[3]]
    assert sorted(training + held_out) == sorted(texts)


def test_the_held_out_documents_of_the_whole_corpus_are_not_near_copies_of_others():
    documents = [*data.load_documents("sotu"), *data.load_documents("austen")]
    held_out = documents[module.HELD_OUT_FIRST :: module.HELD_OUT_EVERY]
    years = {document.year for document in held_out if document.author != "Jane Austen"}
    assert not years & {1867, 1868, 1875, 1897, 1905, 1906, 1907}
    share = [sum(len(d.text) for d in part if d.author == "Jane Austen") for part in (held_out, documents)]
    total = [sum(len(d.text) for d in part) for part in (held_out, documents)]
    assert share[0] / total[0] == pytest.approx(share[1] / total[1], abs=0.03)


def test_batches_of_any_size_walk_through_the_same_windows_and_an_epoch_has_each_once(small):
    n, T = small.windows, small.context
    stream = small.train.shards[0]
    large = small.batch(0, n, seed=3)
    small_batches = torch.cat([small.batch(i, 5, seed=3) for i in range(n // 5)])
    assert torch.equal(small_batches, large[: len(small_batches)])
    every = {tuple(stream[k * T : (k + 1) * T + 1].tolist()) for k in range(n)}
    assert {tuple(row) for row in large.tolist()} == every
    straddling = small.batch(1, n - 2, seed=3)  # the end of the first epoch and most of the second
    assert torch.equal(straddling[:2], large[-2:])
    assert torch.equal(straddling[2:], small.batch(1, n, seed=3)[: n - 4])


def test_a_batch_depends_on_seed_and_number_alone(small, folder):
    again = load_corpus(SMALL, **SETTINGS, folder=folder)
    assert torch.equal(again.batch(7, 4, seed=1), small.batch(7, 4, seed=1))
    assert not torch.equal(small.batch(7, 4, seed=2), small.batch(7, 4, seed=1))
    assert again.digest == small.digest


def test_held_out_windows_follow_each_other_in_the_held_out_text(small):
    _, held, _ = open_shards(small.folder)
    assert small.held_out.shape == (8, 33)
    text = held.tobytes()
    offsets = [text.find(row.astype("<u2").tobytes()) // 2 for row in small.held_out.numpy()]
    assert offsets[0] == 0
    assert all(b - a >= 32 for a, b in itertools.pairwise(offsets))
    assert offsets[-1] > 0.8 * len(held)


def test_frequencies_count_the_training_stream_and_entropy_is_that_of_the_counts(small):
    stream = small.train.shards[0]
    assert small.frequencies.tolist() == [int((stream == k).sum()) for k in range(128)]
    by_hand = -sum(n / len(stream) * math.log(n / len(stream)) for n in small.frequencies if n)
    assert unigram_entropy(stream, 128) == pytest.approx(by_hand, rel=1e-12)
    assert unigram_entropy(np.array([0, 1, 2, 3]), 4) == pytest.approx(math.log(4))


def test_the_table_of_pairs_is_the_one_counted_by_hand(small):
    stream = small.train.shards[0].tolist()
    pairs = Counter(itertools.pairwise(stream))
    firsts = Counter(stream[:-1])
    losses = [
        -math.log((pairs[a, b] + 0.5) / (firsts[a] + 64))
        for window in small.held_out.tolist()
        for a, b in itertools.pairwise(window)
    ]
    assert pair_loss(small) == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_tokens_stand_alone_for_digits_and_never_join_a_word_with_its_punctuation(small):
    vocabulary = small.tokenizer().get_vocab()
    assert len(vocabulary) == 128
    assert vocabulary["<eot>"] == END_ID
    for token in vocabulary:
        if token != "<eot>" and len(token) > 1:
            assert not any(c.isdigit() for c in token), token
            assert token.strip(" ").isalpha() or not any(c.isalpha() for c in token), token


def test_slicing_a_long_text_changes_no_token(monkeypatch):
    text = data.load_documents("sotu")[-1].text
    tokenizer = train_tokenizer([text], 100)
    (whole,) = encode(tokenizer, [text])
    monkeypatch.setattr("nqflib.language_model.tokenizer._SLICE", 50)
    first, second = encode(tokenizer, [text, "and then"])
    assert np.array_equal(first, whole)
    assert second.tolist() == [*tokenizer.encode("and then").ids, END_ID]


def test_windows_reach_across_shards():
    stream = TokenStream([np.arange(0, 5, dtype=np.uint16), np.arange(5, 6, dtype=np.uint16), np.arange(6, 20)])
    starts = np.array([0, 1, 2, 4, 5, 6, 14])
    assert stream.gather(starts, 6).tolist() == [list(range(s, s + 6)) for s in starts]
    with pytest.raises(IndexError, match="3 to 21 lie outside the 20"):
        stream.gather(np.array([3, 15]), 6)


def test_folding_keeps_the_alphabet_and_counts_what_it_replaced():
    folded = fold("“Café” — 5% of…\r\n\n Queen’s  naïve æther ☃\u200b")
    assert folded.text == '"Cafe" -- 5 percent of...\nqueen\'s naive aether'
    expected = {"“": 1, "”": 1, "é": 1, "—": 1, "%": 1, "…": 1, "Q": 1, "’": 1, "ï": 1, "æ": 1, "☃": 1, "\u200b": 1}
    assert dict(folded.replaced) == expected
    assert set(ALPHABET) == set(data.load_text("sotu") + data.load_text("austen"))
    assert fold(data.load_documents("sotu")[5].text).text == data.load_documents("sotu")[5].text
    with pytest.raises(ValueError, match=r"page: 6 of 7 characters have no equal.*'т' \(3\).*byte_level"):
        fold("текст т", "page")


def test_one_s_own_text_is_folded_counted_and_held_out_at_its_end(tmp_path):
    text = data.load_documents("austen")[0].text[:60_000]
    file = tmp_path / "novel.txt"
    file.write_text(text.replace('"', "“"), "utf-8")
    corpus = load_corpus(OwnText((str(file),)), **SETTINGS, folder=tmp_path / "cache")
    assert corpus.replaced == {"“": text.count('"')}
    (training,) = decoded(corpus, corpus.train.shards[0])
    (held_out,) = decoded(corpus, open_shards(corpus.folder)[1])
    assert f"{training} {held_out}" == text.strip()
    assert len(held_out) / len(text) == pytest.approx(1 / 9, rel=0.01)

    foreign = tmp_path / "foreign.txt"
    foreign.write_text("Привет, мир! " * 500, "utf-8")
    with pytest.raises(ValueError, match=r"foreign\.txt: .* have no equal"):
        load_corpus(OwnText((str(foreign),)), **SETTINGS, folder=tmp_path / "cache")
    file.write_bytes(b"abc \xff")
    with pytest.raises(ValueError, match=r"novel\.txt is not UTF-8 text: byte 4 is 0xff"):
        load_corpus(OwnText((str(file),)), **SETTINGS, folder=tmp_path / "cache")


def test_a_byte_vocabulary_takes_any_text(tmp_path):
    text = "Καλημέρα 2024! " + data.load_documents("austen")[0].text[:20_000]
    file = tmp_path / "any.txt"
    file.write_text(text, "utf-8")
    settings = {"vocabulary": 300, "context": 32, "held_out": 8, "byte_level": True}
    corpus = load_corpus(OwnText((str(file),)), **settings, folder=tmp_path)
    (training,) = decoded(corpus, corpus.train.shards[0])
    assert training == text[: len(training)]
    assert corpus.replaced == {}


def test_texts_too_short_and_vocabularies_too_small_are_refused(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 12)
    with pytest.raises(ValueError, match=r"short\.txt: the held-out text has \d+ tokens, room for \d windows"):
        load_corpus(OwnText((str(file),)), vocabulary=24, context=32, folder=tmp_path)
    with pytest.raises(ValueError, match="vocabulary must exceed 17, the 16 characters"):
        load_corpus(OwnText((str(file),)), vocabulary=17, context=32, folder=tmp_path)
    with pytest.raises(ValueError, match=r"the text has merges for \d+ ids only, 200 were asked for"):
        load_corpus(OwnText((str(file),)), vocabulary=200, context=32, folder=tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove"])
def test_a_damaged_shard_is_named_and_left_alone(tmp_path, damage):
    writer = ShardWriter(tmp_path / "tokens", {"kind": "test"}, 10)
    writer.add(np.arange(8) % 10)
    writer.add(np.arange(5) % 10)
    writer.add(np.arange(6) % 10, held_out=True)
    file = tmp_path / "tokens" / "shard_00001.bin"
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-2])
        expected = r"shard_00001\.bin is damaged: it has 8 bytes, expected 10; delete the folder"
    elif damage == "alter":
        file.write_bytes(content[:-2] + b"\x07\x00")
        expected = r"shard_00001\.bin is damaged: its SHA-256 is"
    else:
        file.unlink()
        expected = r"shard_00001\.bin is missing"
    left = file.read_bytes() if file.exists() else None
    with pytest.raises(DamagedFileError, match=expected):
        open_shards(tmp_path / "tokens")
    assert (file.read_bytes() if file.exists() else None) == left


def test_a_writer_refuses_foreign_ids_other_recipes_and_late_shards(tmp_path):
    writer = ShardWriter(tmp_path, {"kind": "a"}, 10)
    with pytest.raises(ValueError, match="ids below 10, got 10"):
        writer.add(np.array([3, 10]))
    writer.add(np.array([3]))
    with pytest.raises(FileNotFoundError, match="not finished"):
        open_shards(tmp_path)
    with pytest.raises(ValueError, match="another recipe"):
        ShardWriter(tmp_path, {"kind": "b"}, 10)
    writer.add(np.array([3]), held_out=True)
    with pytest.raises(ValueError, match="complete"):
        writer.add(np.array([3]))
    with pytest.raises(ValueError, match="1 to 65536 to fit 16 bits, got 65537"):
        ShardWriter(tmp_path, {"kind": "a"}, 65_537)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(DamagedFileError, match=r"shards\.json is damaged"):
        open_shards(tmp_path)


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """A folder of 1,400 short documents in two files, as `datasets` reads them."""
    pytest.importorskip("datasets", reason="pip install 'nqflib[lm]'")
    path = tmp_path_factory.mktemp("web")
    words = data.load_documents("sotu")[100].text.split()
    documents = [" ".join(words[20 * i : 20 * i + 20]) for i in range(700)]
    for number in range(2):
        rows = "".join(json.dumps({"text": f"{number} {text}"}) + "\n" for text in documents)
        (path / f"part{number}.jsonl").write_text(rows)
    settings = {"name": None, "held_out_tokens": 2000, "shard_tokens": 9000, "tokenizer_documents": 300}
    return FineWeb(tokens=25_000, path=str(path), **settings)


def test_a_stream_that_was_cut_off_goes_on_in_the_middle_and_gives_the_same_shards(web, tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "_DOCUMENTS_AT_A_TIME", 16)
    whole = load_corpus(web, vocabulary=300, context=32, held_out=20, folder=tmp_path / "whole")
    assert len(whole.train) >= 25_000
    assert len(whole.train.shards) == 3

    read = []
    text_of = fineweb._text
    monkeypatch.setattr(fineweb, "_text", lambda row, source: read.append(1) or text_of(row, source))
    add = ShardWriter.add

    def add_two_then_fail(self, tokens, **more):
        if len(self.manifest["shards"]) == 2:
            raise KeyboardInterrupt
        add(self, tokens, **more)

    monkeypatch.setattr(ShardWriter, "add", add_two_then_fail)
    with pytest.raises(KeyboardInterrupt):
        load_corpus(web, vocabulary=300, context=32, held_out=20, folder=tmp_path / "cut")
    before = len(read)
    monkeypatch.setattr(ShardWriter, "add", add)
    resumed = load_corpus(web, vocabulary=300, context=32, held_out=20, folder=tmp_path / "cut")
    assert len(read) - before < before / 2, "the documents of finished shards are not read again"
    assert resumed.digest == whole.digest
    for a, b in zip(resumed.train.shards, whole.train.shards, strict=True):
        assert np.array_equal(a, b)
    spelled = decoded(whole, np.concatenate(whole.train.shards))
    lines = "".join(Path(web.path, f"part{number}.jsonl").read_text() for number in range(2)).splitlines()
    rows = [json.loads(line)["text"] for line in lines]
    assert spelled == rows[: len(spelled)]
    held = decoded(whole, open_shards(whole.folder)[1])
    assert held == rows[len(spelled) : len(spelled) + len(held)]


def test_a_stream_that_ends_early_or_cannot_be_reached_says_so(web, tmp_path):
    with pytest.raises(ValueError, match=r"ended when a training shard lacked \d+ tokens"):
        load_corpus(replace(web, tokens=10**6), vocabulary=300, context=32, folder=tmp_path / "a")
    with pytest.raises(ValueError, match="has no column 'body'; it has text"):
        load_corpus(replace(web, column="body"), vocabulary=300, context=32, folder=tmp_path / "b")
    with pytest.raises(ConnectionError, match="cannot reach the texts"):
        load_corpus(replace(web, path=str(tmp_path / "nowhere")), vocabulary=300, context=32, folder=tmp_path / "c")
