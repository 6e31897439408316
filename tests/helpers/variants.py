"""Variants of one claim: some are tried in the quick tests, and the others in the slow ones."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, all of them slow but those named; tuples are of several arguments."""
    found = [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in quick else pytest.mark.slow)
        for one in values
    ]
    assert sum(not one.marks for one in found) == len(quick), quick
    return found


def examples(quick: int, thorough: int, *chosen: Any, derandomize: bool = False, **named: Any) -> Callable[..., Any]:
    """A property that is given what Hypothesis chooses: few examples, and as a slow variant all that it needs."""

    def variants(holds: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("count", [quick, pytest.param(thorough, marks=pytest.mark.slow)])
        def test(count: int) -> None:
            settings(max_examples=count, derandomize=derandomize)(given(*chosen, **named)(holds))()

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(holds, name))
        test.place_as = holds
        return test

    return variants
