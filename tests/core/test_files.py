"""Files and folders are whole or absent, and a place that cannot be written is a user's mistake with a remedy."""

from __future__ import annotations

import pytest

from polyrec.core.errors import ConfigError
from polyrec.core.files import atomic_folder, atomic_path, read_json, write_json


def fail_inside(context, write):
    with context as temporary:
        write(temporary)
        raise RuntimeError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(RuntimeError):
        fail_inside(atomic_path(tmp_path / "a.json"), lambda temporary: temporary.write_text("half"))
    assert read_json(tmp_path / "a.json") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    for content in ("one", "two"):
        with atomic_folder(tmp_path / "folder") as folder:
            (folder / content).touch()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]
    with pytest.raises(RuntimeError):
        fail_inside(atomic_folder(tmp_path / "folder"), lambda folder: (folder / "three").touch())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_in_a_files_place_is_told_with_a_remedy(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError) as error:
        write_json(tmp_path / "a.json", {})
    assert (error.value.code, bool(error.value.remedy)) == ("path_unusable", True)
    assert "is a folder" in error.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("place", ["file/a.json", "file/deeper/a.json"])
@pytest.mark.parametrize("make", [atomic_path, atomic_folder])
def test_a_file_in_the_way_is_told_with_a_remedy(tmp_path, place, make):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError) as error, make(tmp_path / place):
        pass
    assert error.value.code == "path_unusable"
    assert "file" in error.value.message
    assert error.value.remedy
    assert (tmp_path / "file").read_text() == "in the way"
