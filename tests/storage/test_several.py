import threading

import pytest

from daskrr.storage.several import side_by_side


def test_side_by_side__does_them_at_the_same_time():
    together = threading.Barrier(3, timeout=60)
    side_by_side([together.wait] * 3)
    assert not together.broken


def test_side_by_side__raises_the_first_failure_when_all_have_ended():
    done = []

    def fail():
        raise OSError("no room")

    def end():
        done.append(len(done))

    with pytest.raises(OSError, match="no room"):
        side_by_side([end, fail, end, end])
    assert len(done) == 3
