"""The ledger of failure probability: shares that add up, and streams that are never used twice."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskrr.nystrom.ledger import Ledger


def audits_of(ledger, number):
    return list(itertools.accumulate(range(number), lambda one, _: one.after_audit(), initial=ledger))


@given(asked=st.floats(1e-300, 1, exclude_max=True), number=st.integers(1, 400))
def test_share__of_all_audits_is_no_more_than_was_asked(asked, number):
    *before, last = audits_of(Ledger(asked=asked, chooses=True), number)
    spent = math.fsum(one.share for one in before)
    assert 0 < spent <= asked
    assert last.spent == pytest.approx(spent, rel=1e-12)
    assert all(one.share > 0 for one in before)


def test_stream__is_another_for_every_audit_that_chooses():
    streams = [one.stream for one in audits_of(Ledger(asked=0.1, chooses=True), 50)]
    assert len(set(streams)) == len(streams)


def test_share__of_audits_that_choose_nothing_is_all_that_was_asked():
    for ledger in audits_of(Ledger(asked=1e-3, chooses=False), 5):
        assert (ledger.share, ledger.stream) == (1e-3, 0)
        assert ledger.spent == (1e-3 if ledger.audits else 0.0)


def test_share__of_nothing_is_nothing():
    for ledger in audits_of(Ledger(asked=0.0, chooses=True), 5):
        assert (ledger.share, ledger.spent) == (0.0, 0.0)


@given(st.builds(Ledger, asked=st.floats(0, 1), chooses=st.booleans(), audits=st.integers(0, 10**9)))
def test_record__is_read_as_it_was_written(ledger):
    assert Ledger.from_record(json.loads(json.dumps(ledger.to_record()))) == ledger
