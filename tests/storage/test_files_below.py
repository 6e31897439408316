"""Listing of files: sizes and times by key."""

import os

import pytest

from daskrr.storage.local import files_below


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("one", "a/two", "a/b/three"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_files_below__gives_all_files_by_key(folder):
    found = files_below(str(folder), "")
    assert {key: size for key, (size, _) in found.items()} == {"one": 3, "a/two": 5, "a/b/three": 9}
    assert found["a/two"][1] == str(os.stat(folder / "a/two").st_mtime_ns)


@pytest.mark.parametrize("prefix", ["a", "a/"])
def test_files_below__names_them_from_the_root(folder, prefix):
    assert sorted(files_below(str(folder), prefix)) == ["a/b/three", "a/two"]


@pytest.mark.parametrize("prefix", ["one", "gone", "a/gone"])
def test_files_below__finds_nothing_where_there_is_no_folder(folder, prefix):
    assert files_below(str(folder), prefix) == {}


def test_files_below__does_not_follow_links_to_folders_and_skips_those_that_lead_nowhere(folder):
    (folder / "loop").symlink_to(folder)
    (folder / "nowhere").symlink_to(folder / "gone")
    (folder / "file").symlink_to(folder / "one")
    assert sorted(files_below(str(folder), "")) == ["a/b/three", "a/two", "file", "one"]
