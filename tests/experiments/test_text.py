"""Text and batches are functions of their arguments alone."""

import numpy as np
import pytest

from experiments.tasks.text import batch, read_text, standard_library


def test_the_default_is_python_source_in_a_fixed_order():
    files = standard_library()
    assert files == sorted(files)
    assert len(files) > 50
    text = read_text(limit=10_000)
    assert text.data[:2000].tobytes() == files[0].read_bytes()[:2000]
    assert text.sha256 == read_text(limit=10_000).sha256
    assert len(text.data) == 10_000


def test_files_are_joined_in_the_order_given(tmp_path):
    first, second = tmp_path / "z.txt", tmp_path / "a.txt"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    assert read_text([first, second]).data.tobytes() == b"onetwo"
    assert read_text([first, second], limit=4).data.tobytes() == b"onet"


def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    text = read_text(limit=5000)
    options = {"batch_size": 4, "length": 32}
    later = batch(text, seed=0, step=7, **options)
    batch(text, seed=0, step=3, **options)
    np.testing.assert_array_equal(later, batch(text, seed=0, step=7, **options))
    assert not np.array_equal(later, batch(text, seed=0, step=8, **options))
    assert not np.array_equal(later, batch(text, seed=1, step=7, **options))


def test_windows_are_runs_of_the_text_up_to_its_last_byte(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(bytes(range(40)))
    text = read_text([path])
    rows = batch(text, seed=0, step=0, batch_size=200, length=32)
    assert rows.shape == (200, 32)
    np.testing.assert_array_equal(np.diff(rows, axis=1), 1)
    assert rows.min() == 0
    assert rows.max() == 39


def test_too_little_text_is_refused(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="no text"):
        read_text([path])
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes"):
        batch(read_text([path]), seed=0, step=0, batch_size=1, length=4)
