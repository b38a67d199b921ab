"""Mapped files: what comes back, and when a file no longer counts."""

import os

import numpy as np
import pytest

from polyrec.sid.mapped import map_arrays, write_arrays

ARRAYS = {
    "codes": np.arange(21, dtype=np.int32).reshape(7, 3),
    "none": np.zeros((0, 4), np.int64),
    "flags": np.array([True, False, True]),
    "one": np.array(5, np.int64),
    "columns": np.arange(12, dtype=np.int16).reshape(3, 4).T,
}


@pytest.fixture
def files(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"what it was made of")
    write_arrays(tmp_path / "file", ARRAYS, source)
    return tmp_path / "file", source


def test_arrays_come_back_and_writing_to_them_leaves_the_file_alone(files):
    for _ in range(2):
        found = map_arrays(*files)
        assert found.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found[name], array)
        found["codes"][:] = 0


def test_a_copied_folder_needs_no_new_file(files):
    path, source = files
    os.utime(source, ns=(1, 1))
    assert map_arrays(path, source) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda path, source: source.write_bytes(b"something longer than what it was made of"),
        lambda path, source: source.write_bytes(b"WHAT IT WAS MADE OF"),
        lambda path, source: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, source: path.write_bytes(path.read_bytes()[:40]),
        lambda path, source: path.write_bytes(path.read_bytes()[:10]),
        lambda path, source: path.write_bytes(b"another file altogether"),
        lambda path, source: path.write_bytes(b""),
        lambda path, source: path.unlink(),
    ],
)
def test_what_is_stale_or_cut_is_not_used(files, change):
    path, source = files
    change(path, source)
    assert map_arrays(path, source) is None
