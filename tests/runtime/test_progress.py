"""Events of a stage, and what the displays make of them."""

import io
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from daskrr.runtime import progress
from daskrr.runtime.progress import Bar, Event, Lines, Stage, describe, duration, reporter


def run_stage(report, blocks=3, rows=10):
    with Stage(report, "pass 1 gram", total=blocks, total_rows=blocks * rows) as stage:
        for _ in range(blocks):
            stage.advance(rows=rows)


def failing_stage(report, error):
    with Stage(report, "pass 2 scores", total=4, total_rows=40) as stage:
        stage.advance(rows=10)
        raise error


class TestStage:
    def test_announces_counts_and_ends(self):
        seen = []
        run_stage(seen.append)
        assert [(event.done, event.rows) for event in seen] == [(0, 0), (1, 10), (2, 20), (3, 30)]
        assert [event.ended for event in seen] == [False, False, False, True]
        assert all(event.total == 3 and event.total_rows == 30 for event in seen)

    def test_seconds_never_run_backwards(self):
        seen = []
        run_stage(seen.append, blocks=20)
        seconds = [event.seconds for event in seen]
        assert seconds == sorted(seconds)

    def test_ends_even_when_blocks_are_left(self):
        seen = []
        with Stage(seen.append, "sample rows", total=5) as stage:
            stage.advance(tasks=2)
        assert seen[-1].done == 5
        assert seen[-1].ended

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
    def test_an_error_stops_the_stage_and_passes_through(self, error):
        seen = []
        with pytest.raises(type(error)):
            failing_stage(seen.append, error)
        assert seen[-1].stopped
        assert seen[-1].message == type(error).__name__
        assert seen[-1].done == 1

    def test_a_stage_without_blocks_is_one_event(self):
        seen = []
        with Stage(seen.append, "nothing", total=0):
            pass
        assert [event.ended for event in seen] == [True]

    @given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 40))
    def test_done_never_passes_total_and_the_end_comes_last(self, steps, total):
        seen = []
        with Stage(seen.append, "s", total=total) as stage:
            for step in steps:
                stage.advance(tasks=step)
        assert all(event.done <= total for event in seen)
        assert seen[-1].ended


class TestEvent:
    def test_rate_and_time_left(self):
        event = Event("s", 1, 4, 100, 400, 2.0)
        assert event.rate == 50
        assert event.remaining == 6

    def test_nothing_is_known_before_the_first_block(self):
        event = Event("s", 0, 4, 0, 400, 0.0)
        assert event.rate == 0
        assert event.remaining is None

    @pytest.mark.parametrize(
        ("event", "text"),
        [
            (Event("a", 0, 1, 0, 0, 0.0), "a, 1 task"),
            (Event("a", 0, 4, 0, 1000, 0.0), "a, 4 tasks, 1,000 rows"),
            (Event("a", 1, 4, 250, 1000, 0.5), "a, 1/4 tasks, 250 rows, 500 rows/s, 1.5 s left"),
            (Event("a", 4, 4, 1000, 1000, 0.5), "a, done in 0.50 s, 1,000 rows, 2.00 k rows/s"),
            (Event("a", 1, 4, 0, 0, 0.5, "OSError", True), "a, stopped at 1/4 tasks (OSError)"),
        ],
    )
    def test_description(self, event, text):
        assert describe(event) == text

    @given(st.floats(0, 1e7))
    def test_durations_never_show_sixty_of_a_unit(self, seconds):
        parts = duration(seconds).split()
        assert all(float(value) < 60 for value, unit in zip(parts[::2], parts[1::2], strict=True) if unit != "h")

    @given(st.floats(0, 9e11))
    def test_amounts_stay_short(self, value):
        assert len(progress.amount(value)) <= 7


class TestLines:
    def test_start_and_end_always_and_little_between(self):
        stream = io.StringIO()
        report = Lines(stream, every=5.0)
        for done in range(101):
            report(Event("pass 1 gram", done, 100, done * 10, 1000, done * 0.1))
        lines = stream.getvalue().splitlines()
        assert lines[0] == "pass 1 gram, 100 tasks, 1,000 rows"
        assert lines[1].startswith("pass 1 gram, 50/100 tasks, 500 rows, 100 rows/s, 5.0 s left")
        assert lines[2].startswith("pass 1 gram, done in 10 s")
        assert len(lines) == 3

    def test_the_clock_starts_again_with_each_stage(self):
        stream = io.StringIO()
        report = Lines(stream, every=5.0)
        for stage in ("one", "two"):
            for done in (0, 1, 2):
                report(Event(stage, done, 3, 0, 0, done * 6.0))
        assert stream.getvalue().count("left") == 4

    def test_without_a_stream_the_lines_are_log_records(self, caplog):
        with caplog.at_level(logging.INFO, logger="daskrr.progress"):
            run_stage(Lines())
        assert len(caplog.messages) == 2


class TestBar:
    def terminal(self):
        return Console(file=io.StringIO(), force_terminal=True, width=80)

    def test_leaves_one_line_per_stage_and_gives_the_cursor_back(self):
        console = self.terminal()
        with Bar(console) as bar:
            run_stage(bar)
            run_stage(bar)
        text = console.file.getvalue()
        assert text.count("done in") == 2
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2

    def test_gives_the_cursor_back_after_an_interrupt(self):
        console = self.terminal()
        with pytest.raises(KeyboardInterrupt):
            failing_stage(Bar(console), KeyboardInterrupt())
        text = console.file.getvalue()
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
        assert "stopped at 1/4 tasks" in text

    def test_closing_twice_or_in_the_middle_is_safe(self):
        console = self.terminal()
        bar = Bar(console)
        bar(Event("a", 0, 2, 0, 0, 0.0))
        bar.close()
        bar.close()
        bar(Event("a", 1, 2, 0, 0, 1.0))
        bar(Event("a", 2, 2, 0, 0, 2.0))
        assert "a, done in 2.0 s" in console.file.getvalue()

    def test_a_new_stage_replaces_an_unfinished_one(self):
        console = self.terminal()
        with Bar(console) as bar:
            bar(Event("a", 0, 2, 0, 0, 0.0))
            bar(Event("b", 0, 2, 0, 0, 0.0))
        text = console.file.getvalue()
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2


class TestReporter:
    def test_a_callable_gets_every_event(self):
        seen = []
        with reporter(seen.append) as report:
            run_stage(report)
        assert len(seen) == 4

    def test_a_display_is_kept_and_closed(self):
        bar = Bar(Console(file=io.StringIO(), force_terminal=True))
        with reporter(bar) as report:
            assert report is bar
            report(Event("a", 0, 2, 0, 0, 0.0))
        text = bar._console.file.getvalue()
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1

    def test_false_is_silent(self, capsys):
        run_stage(reporter(False))
        assert capsys.readouterr() == ("", "")

    def test_none_logs_and_true_prints_without_a_terminal(self, capsys):
        run_stage(reporter(None))
        assert capsys.readouterr() == ("", "")
        run_stage(reporter(True))
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pass 1 gram, 3 tasks, 30 rows\n")

    @pytest.mark.parametrize("progress", [None, True])
    def test_a_terminal_gets_a_bar(self, monkeypatch, progress):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert isinstance(reporter(progress), Bar)
