"""The command line, from its options to real processes, and the clusters it computes on."""

import gc
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import MISSING, fields
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client, KilledWorker, LocalCluster
from processes import end_soon
from variants import slow_but

import daskrr
from daskrr import errors, kernels
from daskrr.apps import clusters, text
from daskrr.apps.cli import commands, demonstration, main, parsing, telling, usage
from daskrr.apps.cli.options import CERTAINTY, GROUPS, KERNELS, SAMPLINGS, TOLERANCE, LengthScale
from daskrr.apps.interrupts import Terminated, sure_interrupts
from daskrr.jobs import fingerprint
from daskrr.nystrom.sampling import BY_NAME, Leverage, Probabilities, Residual
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.regression.cross_validation import KFold
from daskrr.runtime import rows
from daskrr.storage.output import Output
from daskrr.synthetic import clusters_with_outliers, planted_outliers, write_demo_store

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(daskrr.__file__).parents[1])}
MODEL = ["--kernel", "gaussian", "--length-scale", "2", "--ridge", "1e-3", "--landmarks", "50"]
SECONDS = 240


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def program(*arguments):
    return [sys.executable, "-m", "daskrr.apps.cli", *map(str, arguments)]


def execute(*arguments):
    return subprocess.run(
        program(*arguments), capture_output=True, text=True, timeout=SECONDS, env=ENVIRONMENT, check=False
    )


@pytest.fixture
def points(tmp_path):
    rows, _ = clusters_with_outliers(600, 3, n_outliers=4, random_state=1)
    path = tmp_path / "points.zarr"
    array = zarr.create_array(path, shape=rows.shape, chunks=(200, 3), dtype=rows.dtype)
    array[:] = rows
    return path


def gaussian_scores(rows, length_scale, ridge):
    kernel = kernels.Gaussian(length_scale)(rows, rows)
    return np.diagonal(np.linalg.solve(kernel + len(rows) * ridge * np.eye(len(rows)), kernel))


@pytest.fixture
def scored(points, tmp_path):
    output = tmp_path / "scores.zarr"
    daskrr.score_to_zarr(points, output, kernels.Gaussian(2.0), 1e-3, 50, random_state=0, progress=False)
    return output


@pytest.fixture
def certified(points, tmp_path):
    output = tmp_path / "certified.zarr"
    daskrr.score_to_zarr(
        points, output, kernels.Gaussian(2.0), [1e-2, 1e-3], 50, certify=True, random_state=0, progress=False
    )
    return output


@pytest.fixture
def in_process(monkeypatch):
    """Compute in this process, where a command would start a cluster."""
    monkeypatch.setattr(clusters, "connect", lambda **_options: nullcontext())


class TestLightness:
    def test_the_options_load_no_numerics(self):
        code = (
            "import sys, click.testing, daskrr.apps.cli as cli\n"
            "result = click.testing.CliRunner().invoke(cli.main, ['--help'])\n"
            "assert result.exit_code == 0\n"
            "print([name for name in ('numpy', 'scipy', 'dask', 'distributed', 'zarr', 'rich', 'matplotlib')"
            " if name in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=ENVIRONMENT,
            check=True,
        )
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize("command", ["", "demo", "convert", "score", "update", "run", "top", "sample", "plan"])
    def test_help(self, command):
        result = invoke(*command.split(), "--help")
        assert result.exit_code == 0
        assert "--debug" in result.stdout

    def test_help_documents_the_exit_codes(self):
        text = invoke("--help").stdout
        assert all(f"  {code} " in text for code in (0, 1, 2, 3, 4, 130))

    def test_version(self):
        assert invoke("--version").stdout == f"daskrr, version {daskrr.__version__}\n"

    def test_the_dask_command_has_it_too(self):
        if not any(point.name == "daskrr" for point in metadata.entry_points(group="dask_cli")):
            pytest.skip("daskrr is not installed, only on the path")
        done = subprocess.run(
            [sys.executable, "-m", "dask", "daskrr", "--version"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        assert done.stdout == f"daskrr, version {daskrr.__version__}\n"


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (errors.InvalidParameter("x"), 2),
            (errors.InvalidData("x"), 2),
            (errors.MissingChunks("x"), 2),
            (errors.NotCertified("x"), 2),
            (errors.SourceUnreachable("x"), 3),
            (errors.DoesNotFit("x"), 3),
            (KilledWorker("task", SimpleNamespace(address="tcp://127.0.0.1:1"), 3), 3),
            (errors.OutputExists("x"), 4),
            (errors.CheckFailed("x"), 1),
            (errors.SourceChanged("x"), 1),
            (errors.RidgeTooSmall("x"), 1),
            (errors.KernelNotPositive("x"), 1),
            (ZeroDivisionError("x"), 1),
        ],
    )
    def test_exit_codes(self, monkeypatch, error, code):
        def fail(*_arguments, **_keywords):
            raise error

        monkeypatch.setattr(commands.jobs, "top_rows", fail)
        result = invoke("top", "anything")
        assert result.exit_code == code
        assert result.stdout == ""
        assert result.stderr.startswith("daskrr: ")
        assert "Traceback" not in result.stderr

    def test_interrupt(self, monkeypatch):
        def interrupt(*_arguments, **_keywords):
            raise KeyboardInterrupt

        monkeypatch.setattr(commands.jobs, "top_rows", interrupt)
        result = invoke("top", "anything")
        assert result.exit_code == 130
        assert result.stderr == "daskrr: interrupted\n"

    @pytest.mark.parametrize("arguments", [["--debug", "top", "nowhere"], ["top", "nowhere", "--debug"]])
    def test_debug_shows_where(self, arguments):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "there are no scores at" in result.stderr

    def test_an_unexpected_failure_points_to_debug(self, monkeypatch):
        monkeypatch.setattr(commands.jobs, "top_rows", lambda *_, **__: 1 / 0)
        result = invoke("top", "anything")
        assert result.stderr == "daskrr: ZeroDivisionError: division by zero (add --debug to see where)\n"


class TestKernelOptions:
    def make(self, **options):
        names = ("kernel", "length_scale", "nu", "degree", "offset", "scale", "order", "kernel_spec")
        return parsing.make_kernel({name: options.get(name) for name in names} | {"allow_function": ()})

    def test_every_simple_kernel_and_parameter_has_an_option(self):
        simple = set(kernels.KINDS) - {"scaled", "sum", "product", "function"}
        # A command says its length scale, which has a default in the library alone.
        assert {
            kind: {one.name: one.default in (MISSING, "median") for one in fields(kernels.KINDS[kind])}
            for kind in simple
        } == KERNELS
        options = {parameter.name for parameter in main.commands["score"].params}
        assert {name for known in KERNELS.values() for name in known} <= options

    @pytest.mark.parametrize("text", ["1e-8:1:30", "2:0.5:2", "3:9:1", "1e-300:1e300:5"])
    def test_numbers__in_equal_ratios_are_those_of_numpy(self, text):
        first, last, count = text.split(":")
        expected = np.geomspace(float(first), float(last), int(count))
        assert usage.numbers("--ridges", text) == pytest.approx(expected, rel=1e-12, abs=0)

    def test_every_scheme_of_sampling_is_known_to_the_options(self):
        assert {name: set(options) for name, options in SAMPLINGS.items()} == {
            name: {one.name for one in fields(strategy)} for name, strategy in BY_NAME.items()
        }
        assert set(TOLERANCE.values()) == {one.name for one in fields(Tolerance)}
        assert set(CERTAINTY) == {one.name for one in fields(Certify)}

    @pytest.mark.parametrize(("text", "scale"), [("5", 5.0), ("1,2.5,3", [1.0, 2.5, 3.0]), ("median", "median")])
    def test_length_scales_are_read(self, text, scale):
        assert LengthScale().convert(text, None, None) == scale

    @pytest.mark.parametrize(
        ("options", "kernel"),
        [
            ({"kernel": "linear"}, kernels.Linear()),
            ({"kernel": "gaussian", "length_scale": 5.0}, kernels.Gaussian(5.0)),
            ({"kernel": "gaussian", "length_scale": [1.0, 2.5, 3.0]}, kernels.Gaussian((1.0, 2.5, 3.0))),
            ({"kernel": "laplacian", "length_scale": "median"}, kernels.Laplacian("median")),
            ({"kernel": "matern", "length_scale": 2.0, "nu": "0.5"}, kernels.Matern(2.0, 0.5)),
            (
                {"kernel": "polynomial", "degree": 3, "offset": 0.0, "scale": 2.0},
                kernels.Polynomial(3, 0.0, 2.0),
            ),
            ({"kernel": "bernoulli", "order": 2}, kernels.Bernoulli(2)),
            ({"kernel_spec": '{"kernel": "cosine"}'}, kernels.Cosine()),
        ],
    )
    def test_options_make_the_kernel(self, options, kernel):
        assert self.make(**options) == kernel

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--kernel", "gaussian"], "needs --length-scale: a number, or median"),
            (["--kernel", "gaussian", "--length-scale", "1", "--degree", "2"], "--degree does not apply"),
            (["--kernel", "linear", "--length-scale", "1"], "takes no parameters"),
            (["--kernel", "gaussian", "--length-scale", "wide"], "not 'wide'"),
            (["--kernel", "gaussian", "--length-scale", "-1"], "length_scale must be a positive"),
            (["--kernel", "gaussian", "--length-scale", "1,2"], "2 entries, the rows have 3 features"),
            (["--kernel", "sinc"], "'sinc' is not one of"),
            (["--kernel", "matern", "--length-scale", "1", "--nu", "7"], "'7' is not one of"),
            (["--degree", "2"], "one of --kernel and --kernel-spec"),
            (["--kernel", "linear", "--kernel-spec", "{}"], "one of --kernel and --kernel-spec"),
            (["--kernel-spec", '{"kernel": "linear"}', "--degree", "2"], "--degree does not go with"),
            (["--kernel-spec", "{nonsense"], "is not JSON"),
            (["--kernel-spec", "nowhere.json"], "cannot read the kernel spec"),
            (["--kernel-spec", '{"kernel": "sinc"}'], "unknown kernel 'sinc'"),
            (["--kernel", "linear", "--allow-function", "numpy:inner"], "--kernel-spec only"),
            (["--kernel-spec", '{"kernel": "function", "function": "numpy:inner"}'], "would import"),
        ],
    )
    def test_mistakes_are_usage_errors(self, points, options, message):
        result = invoke("plan", points, *options, "--ridge", "1", "--landmarks", "5")
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""

    def test_a_spec_from_a_file_with_an_allowed_function(self, points, tmp_path):
        (tmp_path / "kernel.json").write_text('{"kernel": "function", "function": "numpy:inner"}')
        allow = ["--allow-function", "numpy:inner"]
        arguments = ["--kernel-spec", tmp_path / "kernel.json", *allow, "--ridge", "1", "--landmarks", "5"]
        assert invoke("plan", points, *arguments).exit_code == 0


class TestScoreChecksFirst:
    @pytest.fixture(autouse=True)
    def no_cluster(self, monkeypatch):
        def refuse(**_options):
            raise AssertionError("a cluster was started for a run that cannot work")

        monkeypatch.setattr(clusters, "connect", refuse)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (["--ridge", "-1"], "every ridge must be positive"),
            (["--ridge", "1e-3"], "ridge 0.001 is in the list 2 times"),
            (["--landmarks", "0"], "0 is not in the range"),
            (["--tolerance", "0.1"], "--landmarks is a number, and --tolerance is there to find it"),
            (["--score-floor", "0.1"], "--landmarks is a number, and --score-floor is there to find it"),
            (["--certify", "--failure-probability", "1"], "failure_probability must be a number from 0"),
            (["--certify", "--failure-probability", "-0.1"], "failure_probability must be a number from 0"),
            (["--certify", "--audit-rows", "0"], "audit_rows must be an int of at least 1"),
            (["--audit-rows", "100"], "--audit-rows goes with --certify or with a tolerance"),
            (["--subset-bound"], "--subset-bound goes with --certify or with a tolerance"),
            (["--rounds", "0"], "rounds must be an int of at least 1"),
            (["--sampling", "leverage", "--epsilon", "0"], "epsilon must be positive"),
            (
                ["--epsilon", "0.1"],
                "--epsilon does not apply to residual sampling, which takes --rounds",
            ),
            (["--sampling", "uniform", "--rounds", "3"], "--rounds does not apply to uniform sampling"),
            (["--sampling", "rows.npy", "--rounds", "3"], "--rounds does not apply to a given array"),
            (["--sampling", "nowhere"], "--sampling is residual, leverage, diagonal, uniform, or the path"),
            (["--sketch-ridge", "-1"], "sketch_ridge must be positive"),
            (["--sampling", "uniform", "--sketch-ridge", "-1"], "sketch_ridge must be positive"),
            (["--sketch-ridge", "0.1"], "drawn by their residual or without replacement do not have"),
            (
                ["--sampling", "diagonal", "--no-replacement", "--sketch-ridge", "0.1"],
                "without replacement do not have",
            ),
            (["--dtype", "float16"], "'float16' is not one of"),
            (["--missing-chunks", "guess"], "'guess' is not one of"),
            (["--workers", "0"], "0 is not in the range"),
        ],
    )
    def test_wrong_values(self, points, tmp_path, change, message):
        result = invoke("score", points, tmp_path / "out.zarr", *MODEL, *change)
        assert result.exit_code == 2
        assert message in result.stderr

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (["--tolerance", "0"], "tolerance must be positive"),
            (["--absolute-tolerance", "-1"], "absolute tolerance must be positive"),
            (["--score-floor", "0"], "score_floor must be positive"),
            (["--audit-rows", "0"], "audit_rows must be an int of at least 1"),
            (["--max-landmarks", "100"], "at least 128, the size of the first round"),
            (["--sampling", "leverage"], "give it with --landmarks"),
            (["--sampling", "diagonal", "--tolerance", "1"], "give it with --landmarks"),
        ],
    )
    def test_wrong_values_without_a_number_of_landmarks(self, points, tmp_path, change, message):
        result = invoke("score", points, tmp_path / "out.zarr", *MODEL[:-2], *change)
        assert result.exit_code == 2
        assert message in result.stderr

    def test_the_sketch_ridge_goes_with_probabilities(self, tmp_path):
        np.save(tmp_path / "numbers.npy", np.arange(20))
        np.save(tmp_path / "probabilities.npy", np.full(600, 1 / 600))
        options = dict.fromkeys(GROUPS["model"]) | {"n_landmarks": 20, "sketch_ridge": 0.1}
        found = parsing.model_arguments(options | {"sampling": str(tmp_path / "probabilities.npy")})["sampling"]
        assert (type(found), found.sketch_ridge) == (Probabilities, 0.1)
        assert parsing.model_arguments(options | {"sampling": "leverage"})["sampling"] == Leverage(sketch_ridge=0.1)
        assert "sampling" not in parsing.model_arguments(options | {"sketch_ridge": 0.0})
        with pytest.raises(errors.InvalidParameter, match=r"landmarks given by number, .* do not have"):
            parsing.model_arguments(options | {"sampling": str(tmp_path / "numbers.npy")})

    def test_no_points(self, tmp_path):
        result = invoke("score", tmp_path / "none.zarr", tmp_path / "out.zarr", *MODEL)
        assert result.exit_code == 2
        assert "no readable Zarr array at" in result.stderr

    def test_a_file_is_to_be_converted_first(self, tmp_path):
        np.save(tmp_path / "rows.npy", np.ones((3, 2)))
        result = invoke("score", tmp_path / "rows.npy", tmp_path / "out.zarr", *MODEL)
        assert result.exit_code == 2
        assert "daskrr convert" in result.stderr

    def test_an_existing_output(self, points, scored):
        before = sorted(path.stat().st_mtime_ns for path in scored.rglob("*"))
        result = invoke("score", points, scored, *MODEL)
        assert result.exit_code == 4
        assert sorted(path.stat().st_mtime_ns for path in scored.rglob("*")) == before


def test_consoles__that_lack_a_character_show_the_rest():
    done = subprocess.run(
        program("λ"), env=ENVIRONMENT | {"PYTHONIOENCODING": "cp1252:strict"}, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 2
    assert done.stderr.endswith(b"No such command '?'." + os.linesep.encode())


class Finalized:
    """Something that is interrupted while it is finalized."""

    number = signal.SIGINT

    def __del__(self):
        os.kill(os.getpid(), self.number)
        sum(range(1000))


def interrupt_collection(phase, info):
    """A function that Python calls when it collects garbage."""
    if phase == "start" and interrupt_collection in gc.callbacks:
        gc.callbacks.remove(interrupt_collection)
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))


# A command that catches its interrupt, has a child and waits for ever.
DEAF = """
import click, contextlib, signal, subprocess, sys, time
from daskrr.apps import interrupts
from daskrr.apps.cli import main

@main.command()
def wait():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(child.pid, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    while True:
        time.sleep(0.1)

main(["wait"])
"""
# A command that tells of its workers as soon as they are processes.
STARTING = """
import psutil, sys, threading, time
from daskrr.apps import clusters
from daskrr.apps.cli import main

def tell():
    found = []
    while len(found) < 2:
        time.sleep(0.01)
        found = [one.pid for one in psutil.Process().children() if "--multiprocessing-fork" in one.cmdline()]
    print(*found, flush=True)

@main.command()
def begin():
    threading.Thread(target=tell, daemon=True).start()
    with clusters.connect(workers=2):
        time.sleep(3600)

if __name__ == "__main__":
    main(["begin"])
"""
# A process that ends without giving back what its children were to share.
LEAVING = """
import multiprocessing, os
from daskrr.apps import interrupts

with interrupts.deaf_children():
    kept = multiprocessing.get_context("spawn").Lock()
os._exit(3)
"""
SIGNALS = {"all": [], "those of Windows": ["SIGALRM", "setitimer", "ITIMER_REAL", "pthread_kill"]}


class TestInterrupts:
    @pytest.mark.parametrize("missing", SIGNALS)
    def test_an_interrupt_within_a_finalizer_is_not_forgotten(self, missing, monkeypatch):
        for name in SIGNALS[missing]:
            monkeypatch.delattr(signal, name)
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

        def work():
            with sure_interrupts():
                Finalized()
                for _ in range(SECONDS * 100):  # without pthread_kill, nothing wakes a thread that waits for long
                    threading.Event().wait(0.01)

        with pytest.raises(KeyboardInterrupt):
            work()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def test_an_interrupt_while_garbage_is_collected_is_not_forgotten(self, capsys):
        def work():
            with sure_interrupts():
                gc.callbacks.append(interrupt_collection)
                gc.collect()
                threading.Event().wait(SECONDS)

        hook = sys.unraisablehook
        with pytest.raises(KeyboardInterrupt):
            work()
        assert sys.unraisablehook is hook
        assert capsys.readouterr().err == ""

    def test_what_else_is_ignored_is_told(self, monkeypatch):
        told = []
        monkeypatch.setattr(sys, "unraisablehook", told.append)
        with sure_interrupts():
            failing = type("Failing", (), {"__del__": lambda self: 1 / 0})
            failing()
        assert [one.exc_type for one in told] == [ZeroDivisionError]

    def test_a_request_to_end_within_a_finalizer_stays_one(self, monkeypatch):
        monkeypatch.setattr(Finalized, "number", signal.SIGTERM)

        def work():
            with sure_interrupts():
                Finalized()
                threading.Event().wait(SECONDS)

        with pytest.raises(Terminated):
            work()

    @pytest.mark.slow
    def test_whatever_does_not_end_is_ended_with_all_that_it_started(self):
        found = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=SECONDS)
        assert (found.returncode, found.stderr) == (130, "daskrr: interrupted\n")
        assert end_soon(int(found.stdout))

    def test_what_was_left_behind_is_cleared_without_a_word(self):
        found = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=SECONDS)
        assert (found.returncode, found.stderr) == (3, "")

    @pytest.mark.slow
    def test_half_started_workers_print_no_traceback_when_they_are_interrupted(self):
        found = subprocess.Popen(
            [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        children = found.stdout.readline().split()
        os.killpg(found.pid, signal.SIGINT)
        _, complaints = found.communicate(timeout=SECONDS)
        assert (found.returncode, complaints) == (130, "daskrr: interrupted\n")
        assert len(children) == 2
        assert end_soon(*map(int, children))

    def test_every_thread_that_was_started_for_them_ends(self):
        with sure_interrupts():
            (sender,) = [thread for thread in threading.enumerate() if thread.name == "daskrr-interrupts"]
        sender.join(SECONDS)
        assert not sender.is_alive()

    def test_an_interrupt_elsewhere_comes_at_once(self):
        def work():
            with sure_interrupts():
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(SECONDS)

        with pytest.raises(KeyboardInterrupt):
            work()

    def test_other_threads_leave_signals_alone(self):
        def work():
            with sure_interrupts():
                pass

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert signal.getsignal(signal.SIGINT) is not None


class TestModelOptions:
    def test_every_argument_of_the_library_has_an_option(self):
        strategies = (Tolerance, Certify, Residual, Leverage)
        settings = {one.name for strategy in strategies for one in fields(strategy)}
        wanted = set(inspect.signature(daskrr.leverage_scores).parameters) - {"X", "kernel", "landmarks", "progress"}
        options = {name: option for option, name in TOLERANCE.items()}
        wanted |= {options.get(name, name) for name in settings} | {"n_landmarks"}
        for command in ("score", "plan"):
            assert wanted <= {parameter.name for parameter in main.commands[command].params}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tolerance", Tolerance().relative),
            ("max_landmarks", Tolerance().most),
            ("audit_rows", Certify().audit_rows),
            ("failure_probability", Certify().failure_probability),
            ("rounds", Residual().rounds),
            ("epsilon", Leverage().epsilon),
            *(
                (name, inspect.signature(daskrr.leverage_scores).parameters[name].default)
                for name in ("sampling", "dtype", "missing_chunks")
            ),
        ],
    )
    def test_help_tells_the_default_of_the_library(self, name, value):
        (option,) = (parameter for parameter in main.commands["score"].params if parameter.name == name)
        assert f" {value} " in option.help

    def test_only_what_was_given_is_passed_on(self, points, monkeypatch):
        seen = []
        monkeypatch.setattr(commands, "make_plan", lambda *_, **options: seen.append(options) or "")
        kernel = ["--kernel", "linear"]
        invoke("plan", points, *kernel, "--ridge", "0.1", "--workers", 1)
        invoke(
            "plan", points, *kernel, "--ridge", "0.1", "--ridge", "2", "--no-replacement", "--certify", "--workers", 1
        )
        assert seen[0] == {"ridge": 0.1, "workers": 1}
        assert seen[1] == seen[0] | {"ridge": [0.1, 2.0], "sampling": Residual(replacement=False), "certify": True}


@pytest.mark.usefixtures("in_process")
class TestJobs:
    def test_the_input_is_opened_and_its_chunks_are_listed_once(self, points, tmp_path, monkeypatch):
        opened, listed = [], []
        opening, listing = rows.ZarrRows.__init__, fingerprint.listing
        monkeypatch.setattr(
            rows.ZarrRows, "__init__", lambda self, *about: opened.append(about) or opening(self, *about)
        )
        monkeypatch.setattr(fingerprint, "listing", lambda *about: listed.append(about) or listing(*about))
        result = invoke("score", points, tmp_path / "scores.zarr", *MODEL, "--quiet")
        assert result.exit_code == 0, result.stderr
        assert len(opened) == 1
        assert len(listed) == 2  # and once more when all is written, to see whether it has changed

    def test_a_finished_job_is_told_and_verified(self, points, tmp_path, monkeypatch):
        output = tmp_path / "scores.zarr"
        line = ["score", points, output, *MODEL, "--seed", 0, "--quiet"]
        first = invoke(*line)
        assert first.exit_code == 0, first.stderr
        result = invoke("status", output)
        assert "600 rows" in result.stdout
        assert "free" in result.stdout
        assert json.loads(invoke("status", output, "--json").stdout)["unfinished"] == []
        assert "everything is as it was written" in invoke("verify", output).stdout
        monkeypatch.setattr(clusters, "connect", lambda **_options: pytest.fail("a cluster was started"))
        again = invoke(*line)
        assert (again.exit_code, again.stdout) == (0, first.stdout)

    def test_status_of_what_is_no_job_is_a_mistake(self, points, tmp_path):
        for path in (points, tmp_path / "nothing.zarr"):
            result = invoke("status", path)
            assert (result.exit_code, result.stdout) == (2, "")
            assert f"there is no job at {path}" in result.stderr

    def test_damage_is_told(self, points, tmp_path):
        output = tmp_path / "scores.zarr"
        invoke("score", points, output, *MODEL, "--seed", 0, "--quiet")
        next(path for path in (output / "scores" / "c").rglob("*") if path.is_file()).unlink()
        result = invoke("verify", output)
        assert result.exit_code == 1
        assert "scores: rows 0" in result.stdout
        assert "1 of its parts differ" in result.stderr

    def test_an_unfinished_job_is_told(self, points, tmp_path, monkeypatch):
        output = tmp_path / "scores.zarr"
        with monkeypatch.context() as patch:
            patch.setattr(Output, "staged", lambda *_arguments: 1 / 0)
            assert invoke("score", points, output, *MODEL, "--seed", 0, "--quiet").exit_code == 1
        text = invoke("status", output).stdout
        for part in (
            "published nothing",
            "600 rows",
            "tasks summed fit-0 1 of 1",
            "tasks scored 0 of 1",
            "ZeroDivisionError",
        ):
            assert part in " ".join(text.split())
        assert invoke("verify", output).exit_code == 2


@pytest.mark.usefixtures("in_process")
class TestRegression:
    @pytest.fixture
    def targets(self, points, tmp_path):
        rows = zarr.open_array(points, mode="r")[:]
        path = tmp_path / "targets.zarr"
        array = zarr.create_array(path, shape=(600,), chunks=(77,), dtype=float)
        array[:] = np.sin(rows[:, 0]) + 5.0
        return path

    def test_a_model_is_fitted_and_predicts(self, points, targets, tmp_path):
        model, output = tmp_path / "model.zarr", tmp_path / "predictions.zarr"
        result = invoke("fit", points, targets, model, *MODEL, "--intercept", "--seed", 0, "--quiet", "--json")
        assert result.exit_code == 0, result.stderr
        summary = json.loads(result.stdout)
        assert (summary["n_rows"], summary["n_features"], summary["output"]) == (600, 3, str(model))
        assert summary["risk_inflation"]["factor"] >= 1
        result = invoke("predict", model, points, output, "--quiet", "--json")
        assert result.exit_code == 0, result.stderr
        predicted = zarr.open_array(output / "predictions", mode="r")[:]
        fitted = daskrr.NystromKernelRidge(kernels.Gaussian(2.0), 1e-3, 50, fit_intercept=True, random_state=0)
        expected = fitted.fit(points, targets).predict(zarr.open_array(points, mode="r")[:])
        np.testing.assert_allclose(predicted, expected, atol=1e-9)
        assert json.loads(result.stdout)["n_rows"] == 600

    def test_both_can_be_read(self, points, targets, tmp_path):
        model = tmp_path / "model.zarr"
        result = invoke("fit", points, targets, model, *MODEL, "--weights", targets, "--quiet")
        assert result.exit_code == 0, result.stderr
        for words in ("600 x 3 features", "gaussian(length_scale=2.0)", "risk inflation", "R2 of training rows"):
            assert words in result.stdout
        result = invoke("predict", model, points, tmp_path / "out.zarr", "--quiet")
        assert "600" in result.stdout
        assert invoke("predict", model, points, tmp_path / "out.zarr", "--quiet").exit_code == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"targets": "points"}, "y must have|one target per row|holds"),
            ({"ridge": "2"}, "a model has one --ridge"),
            ({"weights": "short"}, "X has 600 rows and sample_weight has 5"),
            ({"targets": "nothing"}, "no readable Zarr array"),
        ],
    )
    def test_mistakes_are_told_at_once(self, points, targets, tmp_path, monkeypatch, changes, message):
        monkeypatch.setattr(clusters, "connect", lambda **_options: pytest.fail("a cluster was started"))
        short = tmp_path / "short.zarr"
        zarr.create_array(short, shape=(5,), chunks=(5,), dtype=float)[:] = 1.0
        three = tmp_path / "three.zarr"
        zarr.create_array(three, shape=(5, 2, 2), chunks=(5, 2, 2), dtype=float)[:] = 1.0
        paths = {"points": three, "short": short, "nothing": tmp_path / "nothing.zarr"}
        more = ["--ridge", changes["ridge"]] if "ridge" in changes else []
        more += ["--weights", paths[changes["weights"]]] if "weights" in changes else []
        y = paths[changes["targets"]] if "targets" in changes else targets
        result = invoke("fit", points, y, tmp_path / "model.zarr", *MODEL, *more)
        assert result.exit_code == 2
        assert any(part in result.stderr for part in message.split("|"))

    def test_a_model_is_selected_and_tells_how_sure_it_is(self, points, targets, tmp_path):
        model, output = tmp_path / "model.zarr", tmp_path / "predictions.zarr"
        choice = ["--length-scales", "0.5:8:3", "--ridges", "1e-6:1e-2:3", "--landmarks", 50, "--seed", 0]
        result = invoke("select", points, targets, model, *choice, "--intercept", "--quiet", "--json")
        assert result.exit_code == 0, result.stderr
        summary = json.loads(result.stdout)
        found = summary["selection"]
        assert [kernel["length_scale"] for kernel in found["kernels"]] == pytest.approx([0.5, 2.0, 8.0])
        assert found["ridges"] == pytest.approx([1e-6, 1e-4, 1e-2])
        assert found["best_error"] == min(min(errors) for errors in found["errors"])
        result = invoke("predict", model, points, output, "--std", "--quiet")
        assert "predictions, standard_errors" in result.stdout
        loaded = daskrr.load(model)
        mean, std = loaded.predict(zarr.open_array(points, mode="r")[:], return_std=True)
        np.testing.assert_allclose(zarr.open_array(output / "standard_errors", mode="r")[:], std, rtol=1e-9)
        np.testing.assert_allclose(zarr.open_array(output / "predictions", mode="r")[:], mean, rtol=1e-9)

    @pytest.mark.parametrize("scoring", slow_but(["loo", "gcv", "kfold"], "loo"))
    def test_a_selection_can_be_read(self, points, targets, tmp_path, scoring):
        choice = ["--kernel", "laplacian", "--length-scales", "1,3", "--ridges", "1e-4,1e-2", "--landmarks", 50]
        result = invoke("select", points, targets, tmp_path / "model.zarr", *choice, "--scoring", scoring, "--quiet")
        assert result.exit_code == 0, result.stderr
        for words in ("laplacian(length_scale=3.0)", "at the best of 2 ridges", "risk inflation"):
            assert words in result.stdout

    @pytest.mark.slow
    def test_a_selection_has_as_many_folds_as_asked_for(self, points, targets, tmp_path):
        choice = ["--kernel", "linear", "--ridges", "1e-4,1e-2", "--landmarks", 20, "--folds", 3, "--quiet"]
        for scoring, kept in (("kfold", KFold(3)), ("gcv", "gcv")):
            result = invoke("select", points, targets, tmp_path / scoring, *choice, "--scoring", scoring)
            assert result.exit_code == 0, result.stderr
            assert daskrr.load(tmp_path / scoring).scoring == kept

    @pytest.mark.slow
    def test_a_selection_without_widths_is_about_the_median_distance(self, points, targets, tmp_path):
        choice = ["--ridges", "1e-4,1e-2", "--landmarks", 50, "--quiet", "--json"]
        result = invoke("select", points, targets, tmp_path / "one.zarr", *choice)
        scales = [kernel["length_scale"] for kernel in json.loads(result.stdout)["selection"]["kernels"]]
        assert np.array(scales) / scales[0] == pytest.approx([1, 2, 4, 8])
        result = invoke("select", points, targets, tmp_path / "two.zarr", "--kernel", "linear", *choice)
        assert len(json.loads(result.stdout)["selection"]["kernels"]) == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--ridges", "1e-3:1"], "--ridges must be FROM:TO:COUNT"),
            (["--ridges", "-1:1:3"], "--ridges must be FROM:TO:COUNT"),
            (["--ridges", "a,b"], "--ridges must be FROM:TO:COUNT"),
            (["--ridges", "1,1"], "give each ridge once"),
            (["--length-scales", "0:1:3"], "--length-scales must be FROM:TO:COUNT"),
            (["--kernel", "laplacian"], "the laplacian kernel needs --length-scales"),
            (["--kernel", "linear", "--length-scales", "1,2"], "--length-scale does not apply to the linear kernel"),
            (["--folds", "1"], "--folds"),
        ],
    )
    def test_mistakes_of_a_selection_are_told_at_once(self, points, targets, tmp_path, monkeypatch, options, message):
        monkeypatch.setattr(clusters, "connect", lambda **_options: pytest.fail("a cluster was started"))
        result = invoke("select", points, targets, tmp_path / "model.zarr", "--landmarks", 50, *options)
        assert result.exit_code == 2
        assert message in result.stderr

    def test_mistakes_of_a_prediction_are_told_at_once(self, points, targets, tmp_path, monkeypatch):
        model = tmp_path / "model.zarr"
        assert invoke("fit", points, targets, model, *MODEL, "--quiet").exit_code == 0
        monkeypatch.setattr(clusters, "connect", lambda **_options: pytest.fail("a cluster was started"))
        other = tmp_path / "other.zarr"
        zarr.create_array(other, shape=(5, 2), chunks=(5, 2), dtype=float)[:] = 1.0
        result = invoke("predict", model, other, tmp_path / "out.zarr")
        assert result.exit_code == 2
        assert "X has 2 features" in result.stderr
        sparse = tmp_path / "sparse.zarr"
        zarr.create_array(sparse, shape=(10, 3), chunks=(5, 3), dtype=float)[:5] = 1.0
        result = invoke("predict", model, sparse, tmp_path / "out.zarr")
        assert "--missing-chunks fill" in result.stderr
        monkeypatch.setattr(clusters, "connect", lambda **_options: nullcontext())
        result = invoke("predict", model, sparse, tmp_path / "out.zarr", "--missing-chunks", "fill", "--quiet")
        assert result.exit_code == 0, result.stderr

    def test_tables_are_sent_to_convert(self, points, targets, tmp_path):
        table = tmp_path / "weights.npy"
        np.save(table, np.ones(600))
        result = invoke("fit", points, targets, tmp_path / "model.zarr", *MODEL, "--weights", table)
        assert result.exit_code == 2
        assert "turn it into one with 'daskrr convert'" in result.stderr

    def test_scores_are_no_model(self, points, scored, tmp_path):
        result = invoke("predict", scored, points, tmp_path / "out.zarr")
        assert result.exit_code == 2
        assert "holds scores, not a model" in result.stderr


@pytest.mark.usefixtures("in_process")
class TestScoreInWords:
    def test_a_certified_run_has_a_line_for_every_ridge(self, points, tmp_path):
        arguments = ["--ridge", "1e-2", "--certify", "--seed", 0]
        result = invoke("score", points, tmp_path / "o.zarr", *MODEL, *arguments, "--quiet")
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        store = zarr.open_group(tmp_path / "o.zarr", mode="r")
        certificate = store.attrs["daskrr"]["certificate"]
        assert "but for a chance of at most 1e-06" in result.stdout
        for ridge, (low, high) in zip((0.001, 0.01), certificate["effective_dimension"], strict=True):
            assert any(
                line.split()[:4] == [f"{ridge:g}", f"{low:.6g}", "–", f"{high:.6g}"]
                for line in result.stdout.splitlines()
            )
        highest = int(np.argmax(store["estimate"][:, 0]))
        end = store["upper"][highest, 0]
        _, table = result.stdout.split("highest rows by estimate at ridge 0.001\n")
        assert table.splitlines()[1].split()[0] == str(highest)
        assert f"{end:.3e}" in table.splitlines()[1]

    def test_draws_by_upper_ends_are_told_with_their_ridge(self, points, tmp_path):
        arguments = ["--certify", "--sampling", "leverage", "--epsilon", "0.1", "--seed", 0, "--quiet"]
        result = invoke("score", points, tmp_path / "o.zarr", *MODEL, *arguments)
        assert result.exit_code == 0, result.stderr
        (found,) = zarr.open_group(tmp_path / "o.zarr", mode="r").attrs["daskrr"]["certificate"]["score_fidelity"]
        expected = (
            f"At ridge 0.0001, {found['draws']} landmarks were drawn with at least {found['beta']:.3g} times the "
            "probabilities that the exact scores give"
        )
        assert expected in result.stdout
        assert expected in " ".join(text.certificate(daskrr.open_scores(tmp_path / "o.zarr").summary))

    def test_wide_intervals_come_with_advice(self, points, tmp_path):
        arguments = [*MODEL[:-1], "5", "--certify", "--failure-probability", "0", "--seed", 0, "--quiet"]
        result = invoke("score", points, tmp_path / "o.zarr", *arguments)
        assert "lies in its interval, without exception" in result.stdout
        assert result.stdout.endswith(
            "For narrower intervals, use more --landmarks, a larger --ridge, or --tolerance to find how many.\n"
        )

    def test_without_certificate_there_is_no_interval(self, points, tmp_path):
        result = invoke("score", points, tmp_path / "o.zarr", *MODEL, "--quiet")
        assert "\neffective dimension  at least " in result.stdout
        assert "interval" not in result.stdout

    def test_rounds_are_told_as_they_end_and_the_verdict_at_last(self, points, tmp_path):
        result = invoke("score", points, tmp_path / "o.zarr", *MODEL[:-2], "--seed", 0)
        assert result.exit_code == 0, result.stderr
        assert "round 1 of at most 5: p = 128" in result.stderr
        assert "\ntolerance   met: " in result.stdout
        assert "upper/lower − 1 ≤ 0.5" in result.stdout
        assert {"lower", "upper"} <= set(zarr.open_group(tmp_path / "o.zarr", mode="r").array_keys())

    def test_rounds_of_a_tolerance_are_not_given(self, points, tmp_path):
        result = invoke("score", points, tmp_path / "o.zarr", *MODEL[:-2], "--rounds", 3)
        assert result.exit_code == 2
        assert "--rounds goes with --landmarks" in result.stderr

    def test_a_tolerance_that_is_not_met_is_warned_of_once_though_quiet(self, points, tmp_path):
        arguments = [*MODEL[:-2], "--ridge", "1e-5", "--tolerance", "1e-9", "--max-landmarks", "128", "--seed", 0]
        result = invoke("score", points, tmp_path / "o.zarr", *arguments, "--quiet", "--json")
        assert result.exit_code == 0, result.stderr
        verdict = json.loads(result.stdout)["tolerance"]
        assert not verdict["met"]
        assert result.stderr == verdict["text"] + "\n"


def certified_summary(width=0.1, roundoff=0.0, **others):
    certificate = {"most_width": [width], "roundoff_share": [roundoff]}
    return {"parameters": {"dtype": "float32"}, "certificate": certificate, **others}


@pytest.mark.parametrize(
    ("summary", "advice"),
    [
        (certified_summary(), []),
        (certified_summary(roundoff=0.2), ["Round-off makes up 20% of the width."]),
        (
            certified_summary(width=None, roundoff=0.9),
            ["Round-off makes up 90% of the width. For narrower intervals, use --dtype float64."],
        ),
        (
            certified_summary(width=3.0, roundoff=0.9, parameters={"dtype": "float64"}),
            ["Round-off makes up 90% of the width. For narrower intervals, use a larger --ridge."],
        ),
        (certified_summary(width=3.0, tolerance={"met": True}), []),
        (certified_summary(width=3.0, tolerance={"met": False}), []),
    ],
)
def test_advice__names_what_makes_intervals_wide(summary, advice):
    assert text.advice(summary) == advice


def test_told__shows_a_message_once_and_leaves_the_log_as_it_was(capsys):
    log = logging.getLogger("daskrr")
    before = (log.level, list(log.handlers))
    for quiet in (False, True):
        with telling.told(quiet):
            for _ in range(2):
                log.info("a round")
                log.warning("a problem")
    assert capsys.readouterr().err == "a round\na problem\na problem\n"
    assert (log.level, log.handlers) == before


class TestPlanAndTop:
    def test_plan_in_words_and_as_json(self, points):
        assert "600 rows" in invoke("plan", points, *MODEL).stdout
        figures = json.loads(invoke("plan", points, *MODEL, "--json").stdout)
        assert figures["n_rows"] == 600
        assert figures["n_landmarks"] == 50

    @pytest.mark.parametrize("by", ["estimate", "scores"])
    def test_top(self, scored, by):
        result = json.loads(invoke("top", scored, "-k", 5, "--by", by, "--json").stdout)
        values = zarr.open_array(scored / by, mode="r")[:]
        assert result["by"] == by
        assert [row["row"] for row in result["rows"]] == np.argsort(-values, kind="stable")[:5].tolist()
        lines = invoke("top", scored, "-k", 5, "--by", by).stdout.splitlines()
        assert [int(line.split()[0]) for line in lines[1:-1]] == [row["row"] for row in result["rows"]]
        assert f"No score exceeds k/(k + nλ) = {result['rows'][0]['ceiling']:.4g}" in lines[-1]

    @pytest.mark.parametrize("by", ["lower", "upper"])
    def test_top_by_an_end_of_the_interval_at_a_ridge(self, certified, by):
        result = json.loads(invoke("top", certified, "-k", 5, "--by", by, "--ridge", "1e-2", "--json").stdout)
        ends = zarr.open_array(certified / by, mode="r")[:, 0]
        assert [row[by] for row in result["rows"]] == np.sort(ends)[::-1][:5].tolist()
        assert "certainly between" in invoke("top", certified, "--by", by).stdout

    @pytest.mark.parametrize(
        ("store", "options", "message"),
        [
            ("scored", ["--by", "upper"], "no certified upper in this result"),
            ("scored", ["--by", "lower"], "no certified lower in this result"),
            ("certified", ["--ridge", "7"], "ridge=7.0 is none of those that were scored"),
        ],
    )
    def test_top_of_what_is_not_there(self, request, store, options, message):
        result = invoke("top", request.getfixturevalue(store), *options)
        assert result.exit_code == 2
        assert message in result.stderr


class TestSample:
    def test_rows_and_weights_are_written(self, points, certified, tmp_path):
        output = tmp_path / "sample.zarr"
        arguments = ["--size", 40, "--ridge", "1e-2", "--seed", 3]
        result = invoke("sample", certified, output, *arguments, "--json", "--quiet")
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        summary, group = json.loads(result.stdout), zarr.open_group(output, mode="r")
        wanted = daskrr.jobs.sample_rows(certified, 40, ridge=1e-2, random_state=3, progress=False)
        np.testing.assert_array_equal(group["indices"][:], wanted.indices)
        np.testing.assert_array_equal(group["points"][:], zarr.open_array(points, mode="r")[:][wanted.indices])
        assert summary == {
            "size": 40,
            "distinct": len(set(wanted.indices)),
            "by": "upper",
            "smallest_weight": group["weights"][:].min(),
            "largest_weight": group["weights"][:].max(),
            "sum_of_weights": pytest.approx(group["weights"][:].sum()),
            "random_state": 3,
            "output": str(output),
        }

    @pytest.mark.parametrize(
        ("store", "drawn_by"),
        [
            ("certified", "nine tenths by the upper ends of intervals, one tenth uniformly"),
            ("scored", "half by the estimate, half uniformly"),
        ],
    )
    def test_in_words(self, request, tmp_path, store, drawn_by):
        result = invoke("sample", request.getfixturevalue(store), tmp_path / "sample.zarr", "--size", 30)
        assert result.exit_code == 0, result.stderr
        assert "rows drawn       30\n" in result.stdout
        assert f"drawn by         {drawn_by}\n" in result.stdout
        assert "on average the number of rows" in result.stdout

    def test_points_may_have_moved(self, points, certified, tmp_path):
        points.rename(tmp_path / "moved.zarr")
        arguments = [certified, tmp_path / "sample.zarr", "--size", 5]
        lost = invoke("sample", *arguments)
        assert lost.exit_code == 2
        assert "no readable Zarr array at" in lost.stderr
        assert invoke("sample", *arguments, "--points", tmp_path / "moved.zarr").exit_code == 0

    def test_points_that_were_in_memory_must_be_given(self, points, tmp_path):
        scores = tmp_path / "scores.zarr"
        rows = zarr.open_array(points, mode="r")[:]
        daskrr.score_to_zarr(rows, scores, kernels.Linear(), 1e-2, 3, progress=False)
        arguments = [scores, tmp_path / "sample.zarr", "--size", 5]
        lost = invoke("sample", *arguments)
        assert lost.exit_code == 2
        assert "made from an array in memory (NumPy array)" in lost.stderr
        assert "(--points)" in lost.stderr
        assert invoke("sample", *arguments, "--points", points).exit_code == 0

    def test_wrong_values(self, certified, tmp_path):
        np.save(tmp_path / "rows.npy", np.ones((3, 2)))
        invoke("convert", tmp_path / "rows.npy", tmp_path / "other.zarr")
        for options, message in [
            (["--size", 0], "0 is not in the range"),
            (["--size", 5, "--points", tmp_path / "other.zarr"], "600 rows × 3 features, and X has 3 × 2"),
            (["--size", 5, "--points", tmp_path / "rows.npy"], "daskrr convert"),
            (["--size", 5, "--ridge", "7"], "ridge=7.0 is none of those that were scored"),
        ]:
            result = invoke("sample", certified, tmp_path / "sample.zarr", *options)
            assert result.exit_code == 2
            assert message in result.stderr
        assert not (tmp_path / "sample.zarr").exists()

    def test_an_existing_output(self, certified, tmp_path):
        arguments = [certified, tmp_path / "sample.zarr", "--size", 5]
        assert [invoke("sample", *arguments, *more).exit_code for more in ([], [], ["--overwrite"])] == [0, 4, 0]

    def test_a_scheduler_is_used_if_given(self, certified, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr(clusters, "connect", lambda cluster, **_: seen.append(cluster) or nullcontext())
        arguments = [certified, tmp_path / "sample.zarr", "--size", 5, "--cluster", "tcp://somewhere:8786"]
        assert invoke("sample", *arguments).exit_code == 0
        assert seen == ["tcp://somewhere:8786"]


class TestConvert:
    def test_options_reach_the_conversion(self, tmp_path):
        (tmp_path / "t.csv").write_text("a;b;c\n1;2;x\n3;4;y\n5;9;z\n")
        arguments = [tmp_path / "t.csv", tmp_path / "t.zarr", "--columns", "b, 0", "--standardize"]
        result = invoke("convert", *arguments, "--dtype", "float32", "--json", "--quiet")
        assert result.exit_code == 0
        assert result.stderr == ""
        assert json.loads(result.stdout)["columns"] == ["b", "a"]
        array = zarr.open_array(tmp_path / "t.zarr", mode="r")
        assert array.dtype == "float32"
        np.testing.assert_allclose(array[:, 1], [-1.2247449, 0, 1.2247449], rtol=1e-6)

    def test_summary_in_words(self, tmp_path):
        np.savez(tmp_path / "t.npz", one=np.ones((4, 2)), two=np.ones((3, 2)))
        result = invoke("convert", tmp_path / "t.npz", tmp_path / "t.zarr", "--array", "two", "--standardize")
        assert result.exit_code == 0
        assert "constant, only centred  0, 1" in result.stdout
        assert "write rows, done" in result.stderr

    def test_failures(self, tmp_path):
        (tmp_path / "t.csv").write_text("a\n" + 9 * "1\n" + "x\n")
        result = invoke("convert", tmp_path / "t.csv", tmp_path / "t.zarr")
        assert result.exit_code == 2
        assert "row 9, column 'a': 'x' is not" in result.stderr
        assert invoke("convert", tmp_path / "t.csv", tmp_path).exit_code == 4
        wrong_type = invoke("convert", tmp_path / "t.csv", tmp_path / "t.zarr", "--dtype", "wide")
        assert wrong_type.exit_code == 2


class TestProcesses:
    @pytest.mark.slow
    def test_score_gives_exact_scores_when_every_row_is_a_landmark(self, points, tmp_path):
        np.save(tmp_path / "all.npy", np.arange(600))
        output = tmp_path / "scores.zarr"
        arguments = [*MODEL[:-2], "--sampling", tmp_path / "all.npy", "--workers", 1, "--json"]
        done = execute("score", points, output, *arguments)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert done.stdout.count("\n") == 1
        assert summary["n_rows"] == 600
        assert "dashboard: http://127.0.0.1:" in done.stderr
        assert "pass 2: scores, done" in done.stderr
        wanted = gaussian_scores(zarr.open_array(points, mode="r")[:], 2.0, 1e-3)
        np.testing.assert_allclose(zarr.open_array(output / "scores", mode="r")[:], wanted, rtol=1e-6)
        assert summary["sketch_dimension"] == pytest.approx(wanted.sum(), rel=1e-8)
        [[low, high]] = summary["effective_dimension"]
        assert (low, high) == (pytest.approx(wanted.sum(), rel=1e-6), None)

    @pytest.mark.slow
    def test_score_in_words_on_a_running_scheduler(self, points, tmp_path):
        with clusters.local_cluster(1) as cluster:
            address = cluster.scheduler_address
            done = execute("score", points, tmp_path / "o.zarr", *MODEL, "--cluster", address, "--quiet")
            assert done.returncode == 0, done.stderr
            assert done.stderr == ""
            assert "effective dimension" in done.stdout
            assert "highest rows by estimate" in done.stdout
            assert len(cluster.scheduler_info["workers"]) == 1

    @pytest.mark.slow
    def test_too_little_memory_is_a_cluster_problem(self, points, tmp_path):
        limits = ["--workers", 1, "--memory-limit", "100MiB"]
        done = execute("score", points, tmp_path / "o.zarr", *MODEL, *limits)
        assert done.returncode == 3
        assert "memory limit" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "o.zarr").exists()

    @pytest.mark.slow
    def test_a_gpu_that_workers_have_not_is_a_cluster_problem(self, points, tmp_path):
        done = execute("score", points, tmp_path / "o.zarr", *MODEL, "--workers", 2, "--device", "cuda")
        assert done.returncode == 3
        assert "device='cuda' was asked for, and 2 workers have none: tcp://" in done.stderr
        assert "pip install '.[cuda]'" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "o.zarr").exists()

    @pytest.mark.slow
    def test_the_interrupt_key_leaves_nothing_but_what_to_go_on_with(self, tmp_path):
        write_demo_store(tmp_path / "points.zarr", planted_outliers(400_000), chunk_rows=16_384)
        arguments = [
            "score",
            tmp_path / "points.zarr",
            tmp_path / "o.zarr",
            *MODEL[:-1],
            "1000",
            "--workers",
            1,
        ]
        process = subprocess.Popen(
            program(*arguments), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
        )
        try:
            assert process.stderr is not None
            assert any(line.startswith("pass 1") for line in process.stderr)
            os.killpg(process.pid, signal.SIGINT)
            _, rest = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 130
        assert rest.endswith("daskrr: interrupted\n")
        assert "Traceback" not in rest
        assert sorted(path.name for path in tmp_path.iterdir()) == ["o.zarr", "points.zarr"]
        assert [path.name for path in (tmp_path / "o.zarr").iterdir()] == [".daskrr"]
        with pytest.raises(errors.InvalidData, match="unfinished job and no finished scores"):
            daskrr.open_scores(tmp_path / "o.zarr")

    @pytest.mark.slow
    def test_demo(self, tmp_path):
        done = execute("demo", "--rows", 30_000, "--directory", tmp_path / "demo", "--seed", 3, "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["found"] == result["planted"] == 40
        assert (tmp_path / "demo" / "daskrr-demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_fails_when_planted_rows_are_not_found(tmp_path, monkeypatch):
    def score_in_process(points, scores, *_arguments):
        return daskrr.score_to_zarr(
            points, scores, kernels.Linear(), 1e-3, 2, random_state=0, progress=False, overwrite=True
        ) | {"dashboard": None}

    monkeypatch.setattr(demonstration, "_score_demo", score_in_process)
    monkeypatch.setattr(commands.jobs, "top_rows", lambda *_, **__: [])
    result = invoke("demo", "--rows", 5000, "--directory", tmp_path)
    assert result.exit_code == 1
    assert "0 of 40 planted rows" in result.stdout
    assert result.stderr == "daskrr: only 0 of 40 planted rows were found\n"
    assert (tmp_path / "daskrr-demo.png").exists()


class TestClusters:
    @pytest.mark.slow
    def test_the_embedded_cluster_has_workers_of_one_thread_and_ends_with_them(self):
        with clusters.connect(workers=1, echo=lambda line: None) as client:
            (pid,) = client.run(os.getpid).values()
            assert set(client.nthreads().values()) == {1}
            limits = [worker["memory_limit"] for worker in client.scheduler_info()["workers"].values()]
            assert all(limit > 0 for limit in limits)
        assert not psutil.pid_exists(pid)

    def test_an_address_nobody_answers_at(self, monkeypatch):
        monkeypatch.setattr(clusters, "CONNECT_SECONDS", 0.5)
        with (
            pytest.raises(errors.SourceUnreachable, match=r"answers at tcp://127\.0\.0\.1:9 "),
            clusters.connect("tcp://127.0.0.1:9"),
        ):
            pass

    @pytest.mark.parametrize("address", ["nonsense", "carrier-pigeon://x:1"])
    def test_an_address_that_is_none(self, address):
        with pytest.raises(errors.SourceUnreachable, match="check the address"), clusters.connect(address):
            pass

    @pytest.mark.parametrize("address", ["nonsense", "carrier-pigeon://x:1", "tcp://127.0.0.1:9"])
    def test_a_client_that_does_not_connect_is_closed_at_once(self, address, monkeypatch):
        made, start = [], Client.__init__

        def seen(client, *arguments, **settings):
            made.append(client)
            start(client, *arguments, **settings)

        monkeypatch.setattr(clusters, "CONNECT_SECONDS", 0.5)
        monkeypatch.setattr(Client, "__init__", seen)
        with pytest.raises(errors.SourceUnreachable), clusters.connect(address):
            pass
        assert [client.status for client in made] == ["closed"]

    def test_a_scheduler_without_workers(self):
        with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=None) as cluster:
            address = cluster.scheduler_address
            with (
                pytest.raises(errors.SourceUnreachable, match="has had no worker"),
                clusters.connect(address, worker_seconds=0.2),
            ):
                pass

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"workers": 0}, "at least one worker"),
            ({"memory_limit": "plenty"}, "'plenty' is not an amount"),
            ({"memory_limit": 0}, "cannot live with 0"),
            ({"cluster": "tcp://127.0.0.1:1", "workers": 2}, "not one that runs already"),
        ],
    )
    def test_impossible_clusters(self, options, message):
        with pytest.raises(errors.InvalidParameter, match=message), clusters.connect(**options):
            pass


# --- Notes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_score__says_that_landmarks_were_cut_and_that_a_ridge_is_too_small(points, tmp_path):
    model = ["--kernel", "gaussian", "--length-scale", "0.05", "--ridge", "1e-12", "--landmarks", "700"]
    found = execute("score", points, tmp_path / "out.zarr", *model, "--workers", "1", "--quiet")
    assert found.returncode == 0, found.stderr
    for line in ("landmarks=700 was cut to the 600 rows there are", "the ridge 1e-12 is so small that"):
        assert f"Note: {line}" in found.stdout
        assert line in found.stderr
    report = tmp_path / "report.html"
    assert invoke("report", tmp_path / "out.zarr", "-o", report).exit_code == 0
    assert "the ridge 1e-12 is so small that" in report.read_text()
