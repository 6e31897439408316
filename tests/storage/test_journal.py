"""What a run has finished, under labels and numbers."""

import pytest

from daskrr.errors import InvalidParameter
from daskrr.storage.journal import Journal
from daskrr.storage.records import Records


@pytest.fixture
def journal(tmp_path):
    return Journal(Records(tmp_path), "job")


def test_write_all__records_under_every_label(journal):
    journal.write_all(7, {"sums": {"n_rows": 3}, "kept": {"blocks": [1, 2]}})
    assert (journal.done("sums"), journal.done("kept")) == ({7}, {7})
    assert (journal.read("sums", 7), journal.read("kept", 7)) == ({"n_rows": 3}, {"blocks": [1, 2]})


def test_write_all__raises_once_all_others_are_there(journal):
    with pytest.raises(InvalidParameter, match="a record's name"):
        journal.write_all(7, {"Not Plain": {}, "kept": {"blocks": []}})
    assert journal.done("kept") == {7}
