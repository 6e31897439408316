"""A few minutes of :mod:`soak`."""

from pathlib import Path

import pytest
from soak import EVENTS, Soak


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_soak__of_three_minutes_ends_with_exact_scores_inside_all_intervals(tmp_path: Path) -> None:
    found = Soak(tmp_path, seed=0).live(minutes=3)
    print(found)
    assert all(found[event] for event in EVENTS)
    assert found["generations"] > 3
    for reader in ("ours", "plain", "keeping"):
        assert found[reader]["reads"] > 20
        assert found[reader]["generations"] > 1
