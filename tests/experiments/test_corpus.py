"""Packed batches are a function of seed and step, and read every window once an epoch."""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from experiments.pack_text import PackText
from experiments.pack_text import run as run_pack_text
from experiments.tasks.corpus import Corpus, prefetch, shuffled, write_corpus
from experiments.train_sharded import TrainSharded, run

LENGTHS = (5, 0, 13, 1, 30, 7, 64, 20)
DOCUMENTS = np.split(np.arange(140), np.cumsum(LENGTHS)[:-1])  # no token twice


@pytest.fixture
def corpus(tmp_path):
    assert write_corpus(tmp_path, iter(DOCUMENTS)) == 140
    return Corpus.open(tmp_path, 8)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_the_order_is_a_permutation_of_its_own_for_every_seed_and_epoch(size):
    orders = [shuffled(np.arange(size), size, seed) for seed in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    if size > 7:
        assert not any(np.array_equal(a, b) for a, b in itertools.combinations(orders, 2))
        assert not np.array_equal(orders[0], np.arange(size))
        assert abs(np.corrcoef(np.arange(size), orders[0])[0, 1]) < 4 / size**0.5


def test_windows_hold_the_documents_in_order_and_ids_change_where_they_end(corpus):
    rows = corpus.windows(np.arange(len(corpus)))
    used = len(corpus) * 8
    np.testing.assert_array_equal(rows.tokens.ravel(), np.concatenate(DOCUMENTS)[:used])
    document = np.repeat(np.arange(len(DOCUMENTS)), [len(d) for d in DOCUMENTS])[:used]
    document = document.reshape(-1, 8)
    changes = np.diff(document, axis=1) != 0
    np.testing.assert_array_equal(np.diff(rows.segment_ids, axis=1) != 0, changes)
    assert (rows.segment_ids[:, 0] == 0).all()
    np.testing.assert_array_equal(corpus[3].tokens, rows.tokens[3])


def test_an_epoch_reads_every_window_once_whatever_the_batch(corpus):
    windows = {row.tobytes(): i for i, row in enumerate(corpus.windows(np.arange(17)).tokens)}
    for batch_size in (1, 17):
        steps = range(17 // batch_size)
        rows = [corpus.batch(seed=3, step=s, batch_size=batch_size).tokens for s in steps]
        assert sorted(windows[row.tobytes()] for row in np.concatenate(rows)) == list(range(17))
    across = corpus.batch(seed=3, step=3, batch_size=5)  # two epochs meet in this one
    alone = [corpus.batch(seed=3, step=s, batch_size=1).tokens[0] for s in range(15, 20)]
    np.testing.assert_array_equal(across.tokens, alone)


def test_tokens_stay_on_disk(corpus):
    assert isinstance(corpus.tokens, np.memmap)
    assert isinstance(corpus.ends, np.memmap)


def test_what_is_no_corpus_is_refused(tmp_path, corpus):
    with pytest.raises(ValueError, match=r"corpus\.json"):
        Corpus.open(tmp_path / "nothing", 8)
    with pytest.raises(ValueError, match="length"):
        Corpus.open(tmp_path, 141)
    with pytest.raises(ValueError, match="255"):
        write_corpus(tmp_path / "wide", [np.asarray([256])])
    with pytest.raises(ValueError, match="none"):
        write_corpus(tmp_path / "empty", [])
    with (tmp_path / "tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="140"):
        Corpus.open(tmp_path, 8)


def _ends(values):
    return np.asarray(values, np.int64).tobytes()


GOOD = np.cumsum(LENGTHS)
DAMAGED = {
    "cut": (_ends(GOOD[:-1]), "the last of its ends must be 140"),
    "torn": (_ends(GOOD)[:-3], "ends.bin has 61 bytes"),
    "empty": (b"", "ends.bin has 0 bytes"),
    "falling": (_ends([5, 3, *GOOD[2:]]), "must rise from 0"),
    "negative": (_ends([-1, *GOOD[1:]]), "must rise from 0"),
    "of-another": (_ends([5, 6, *GOOD[2:]]), "checksum"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_ends_are_refused(tmp_path, corpus, name):
    data, message = DAMAGED[name]
    (tmp_path / "ends.bin").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Corpus.open(tmp_path, 8)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"dtype": "f4", "tokens": 140, "largest": 1}'])
def test_damaged_descriptions_are_refused(tmp_path, corpus, text):
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(ValueError, match=r"corpus\.json"):
        Corpus.open(tmp_path, 8)


def test_tokens_beyond_the_largest_are_refused_when_they_are_read(corpus):
    with pytest.raises(ValueError, match=r"must be in \[0, 5\]"):
        replace(corpus, largest=5).windows(np.arange(3))


def test_a_corpus_that_is_written_again_stays_whole_for_who_has_mapped_it(tmp_path, corpus):
    before = corpus.windows(np.arange(len(corpus)))
    write_corpus(tmp_path, [np.asarray([7])])
    after = corpus.windows(np.arange(len(corpus)))
    np.testing.assert_array_equal(before.tokens, after.tokens)
    assert len(Corpus.open(tmp_path, 1)) == 1


def test_an_interrupted_rewrite_leaves_the_corpus_as_it_was(tmp_path, corpus):
    def documents():
        yield np.asarray([1, 2, 3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path, documents())
    again = Corpus.open(tmp_path, 8)
    np.testing.assert_array_equal(again.tokens, corpus.tokens)


def test_packing_a_directory_leaves_its_own_output_out(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    options = PackText(out=tmp_path / "corpus", files=(tmp_path,))
    assert [run_pack_text(options) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_prefetching_raises_what_ends_a_program(error):
    def make(step):
        raise error

    with pytest.raises(error):
        next(prefetch(make, range(2)))


def test_prefetching_keeps_the_order_and_stays_within_its_depth():
    made = []

    def make(step):
        made.append(step)
        return step

    batches = prefetch(make, range(10), depth=2)
    assert next(batches) == 0
    threading.Event().wait(0.2)
    assert len(made) <= 4  # the one given out, two ready, one in the thread's hands
    assert list(batches) == list(range(1, 10))


def test_prefetching_raises_where_the_batch_would_have_been_and_ends_with_its_consumer():
    def make(step):
        if step == 1:
            raise RuntimeError("no such window")
        return step

    before = threading.active_count()
    batches = prefetch(make, range(5))
    assert next(batches) == 0
    with pytest.raises(RuntimeError, match="no such window"):
        next(batches)
    endless = prefetch(lambda step: step, itertools.count())
    assert next(endless) == 0
    endless.close()
    assert threading.active_count() == before


def test_a_model_trains_on_packed_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / name).write_bytes(b"one document, " * 5 + name.encode())
    assert run_pack_text(PackText(tmp_path / "packed", (tmp_path / "text",))) == 142
    options = TrainSharded(
        corpus=tmp_path / "packed", steps=3, batch=2, tokens=16, hidden_size=8, num_heads=1,
        num_layers=1, vocab_size=256, implementation="recurrent",
    )  # fmt: skip
    losses = run(options)
    assert list(losses) == [0, 1, 2]
    assert all(np.isfinite(list(losses.values())))
    with pytest.raises(ValueError, match="117"):
        run(replace(options, vocab_size=64))
