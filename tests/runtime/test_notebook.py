"""The display of a notebook, with widgets and without."""

import sys
from types import SimpleNamespace

import pytest

from daskrr.runtime import telemetry
from daskrr.runtime.notebook import Widget, in_notebook, notebook_display
from daskrr.runtime.progress import Event, Lines, Stage


class Part:
    """Stands for any widget: keeps what it is given."""

    def __init__(self, children=(), value="", **options):
        self.children, self.value, self.bar_style = children, value, ""
        self.layout = SimpleNamespace(display="")


WIDGETS = SimpleNamespace(HTML=Part, FloatProgress=Part, Layout=SimpleNamespace, VBox=Part, HBox=Part)


@pytest.fixture
def notebook(monkeypatch):
    """This process as the kernel of a notebook."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.fixture
def shown():
    return []


@pytest.fixture
def widget(shown):
    return Widget(WIDGETS, shown.append)


def interrupted(widget):
    with widget, Stage(widget, "pass 1", 4) as stage:
        stage.advance()
        raise KeyboardInterrupt


class TestWidget:
    def test_is_shown_once_and_only_if_something_happens(self, widget, shown):
        assert shown == []
        for done in (0, 1, 2):
            widget(Event("pass 1: gram", done, 2, 100 * done, 200, done))
        assert len(shown) == 1

    def test_tells_pass_rate_and_time_left(self, widget):
        widget(Event("algebra", 1, 1, 0, 0, 1.0, dimension=(41.0, 43.0)))
        widget(Event("pass 2: scores", 0, 4, 0, 400, 0.0))
        widget._next = 0.0
        widget(Event("pass 2: scores", 1, 4, 100, 400, 2.0))
        assert widget._bar.value == 0.25
        text = "pass 2: scores · 1/4 · 50 rows/s · 6.0 s left · effective dimension 41.0–43.0"
        assert text in widget._figures.value

    def test_leaves_a_line_for_every_stage(self, widget):
        with widget:
            for name in ("one", "<two>"):
                with Stage(widget, name, 1):
                    pass
        assert widget._lines.value.count("done in") == 2
        assert "&lt;two&gt;" in widget._lines.value
        assert widget._bar.layout.display == "none"

    def test_stops_where_it_was_interrupted(self, widget):
        with pytest.raises(KeyboardInterrupt):
            interrupted(widget)
        assert widget._bar.bar_style == "danger"
        assert "stopped at 1/4 tasks (KeyboardInterrupt)" in widget._lines.value
        assert widget._bar.layout.display == ""

    def test_draws_no_more_than_a_person_can_see(self, widget):
        drawn = []
        widget._draw = drawn.append
        for done in range(1000):
            widget(Event("pass 1", done, 1000, 0, 0, done * 1e-6))
        assert len(drawn) < 20


class TestChoice:
    def test_no_notebook_here(self):
        assert not in_notebook()

    @pytest.mark.parametrize("progress", [None, True])
    def test_a_notebook_gets_a_widget(self, notebook, monkeypatch, progress):
        monkeypatch.setitem(sys.modules, "ipywidgets", WIDGETS)
        monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=print))
        assert in_notebook()
        assert isinstance(telemetry.reporter(progress), Widget)

    def test_a_notebook_without_ipywidgets_gets_text(self, notebook, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
        display = notebook_display()
        assert isinstance(display, Lines)
        display(Event("pass 1", 1, 1, 0, 0, 1.0))
        assert capsys.readouterr().out == "pass 1, done in 1.0 s\n"

    def test_silence_stays_silence(self, notebook):
        assert not isinstance(telemetry.reporter(False), Widget)

    def test_a_function_gets_every_event(self, notebook):
        seen = []
        telemetry.reporter(seen.append)(Event("a", 0, 1, 0, 0, 0.0))
        assert len(seen) == 1
