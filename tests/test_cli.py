"""The command line, from its options to real processes, and the clusters it computes on."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import KilledWorker, LocalCluster

import daskrr
from daskrr import errors, kernels
from daskrr.apps import clusters, commands
from daskrr.apps.cli import KERNELS, main
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

    @pytest.mark.parametrize("command", ["", "demo", "convert", "score", "top", "plan"])
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

        monkeypatch.setattr(commands.scoring, "top_rows", fail)
        result = invoke("top", "anything")
        assert result.exit_code == code
        assert result.stdout == ""
        assert result.stderr.startswith("daskrr: ")
        assert "Traceback" not in result.stderr

    def test_interrupt(self, monkeypatch):
        def interrupt(*_arguments, **_keywords):
            raise KeyboardInterrupt

        monkeypatch.setattr(commands.scoring, "top_rows", interrupt)
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
        monkeypatch.setattr(commands.scoring, "top_rows", lambda *_, **__: 1 / 0)
        result = invoke("top", "anything")
        assert result.stderr == "daskrr: ZeroDivisionError: division by zero (add --debug to see where)\n"


class TestKernelOptions:
    def make(self, **options):
        names = ("kernel", "length_scale", "nu", "degree", "offset", "scale", "order", "kernel_spec")
        return commands.make_kernel({name: options.get(name) for name in names} | {"allow_function": ()})

    def test_every_simple_kernel_and_parameter_has_an_option(self):
        assert set(KERNELS) == set(kernels.KINDS) - {"scaled", "sum", "product", "function"}
        options = {parameter.name for parameter in main.commands["score"].params}
        assert {field.name for kind in KERNELS for field in fields(kernels.KINDS[kind])} <= options

    @pytest.mark.parametrize(
        ("options", "kernel"),
        [
            ({"kernel": "linear"}, kernels.Linear()),
            ({"kernel": "gaussian", "length_scale": "5"}, kernels.Gaussian(5.0)),
            ({"kernel": "gaussian", "length_scale": "1,2.5,3"}, kernels.Gaussian((1.0, 2.5, 3.0))),
            ({"kernel": "laplacian", "length_scale": "median"}, kernels.Laplacian("median")),
            ({"kernel": "matern", "length_scale": "2", "nu": "0.5"}, kernels.Matern(2.0, 0.5)),
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
            (["--kernel", "gaussian"], "needs --length-scale"),
            (["--kernel", "gaussian", "--length-scale", "1", "--degree", "2"], "--degree does not apply"),
            (["--kernel", "linear", "--length-scale", "1"], "takes no parameters"),
            (["--kernel", "gaussian", "--length-scale", "wide"], "not 'wide'"),
            (["--kernel", "gaussian", "--length-scale", "-1"], "length_scale must be a positive"),
            (["--kernel", "gaussian", "--length-scale", "1,2"], "2 entries, the rows have 3 features"),
            (["--kernel", "sinc"], "'sinc' is not one of"),
            (["--kernel", "matern", "--length-scale", "1", "--nu", "7"], "'7' is not one of"),
            ([], "one of --kernel and --kernel-spec"),
            (["--kernel", "linear", "--kernel-spec", "{}"], "one of --kernel and --kernel-spec"),
            (["--kernel-spec", '{"kernel": "linear"}', "--degree", "2"], "--degree does not go with"),
            (["--kernel-spec", "{nonsense"], "as JSON"),
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
            (["--ridge", "-1"], "ridge must be positive"),
            (["--landmarks", "0"], "0 is not in the range"),
            (["--sampling", "nowhere"], "--sampling is uniform, diagonal, or the path"),
            (["--sketch-ridge", "-1"], "sketch_ridge must be positive"),
            (["--dtype", "float16"], "'float16' is not one of"),
            (["--missing-chunks", "guess"], "'guess' is not one of"),
            (["--workers", "0"], "0 is not in the range"),
        ],
    )
    def test_wrong_values(self, points, tmp_path, change, message):
        result = invoke("score", points, tmp_path / "out.zarr", *MODEL, *change)
        assert result.exit_code == 2
        assert message in result.stderr

    def test_the_number_of_landmarks_is_needed(self, points, tmp_path):
        result = invoke("score", points, tmp_path / "o.zarr", *MODEL[:-2])
        assert result.exit_code == 2
        assert "--landmarks" in result.stderr

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
        assert [int(line.split()[0]) for line in lines[1:]] == [row["row"] for row in result["rows"]]


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
        (tmp_path / "t.csv").write_text("a\n1\nx\n")
        result = invoke("convert", tmp_path / "t.csv", tmp_path / "t.zarr")
        assert result.exit_code == 2
        assert "line 3, column 'a': 'x' is not" in result.stderr
        assert invoke("convert", tmp_path / "t.csv", tmp_path).exit_code == 4
        wrong_type = invoke("convert", tmp_path / "t.csv", tmp_path / "t.zarr", "--dtype", "wide")
        assert wrong_type.exit_code == 2


class TestProcesses:
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
        assert summary["effective_dimension"] == pytest.approx(wanted.sum(), rel=1e-8)

    @pytest.mark.slow
    def test_score_in_words_on_a_running_scheduler(self, points, tmp_path):
        with clusters.local_cluster(1) as cluster:
            address = cluster.scheduler_address
            done = execute("score", points, tmp_path / "o.zarr", *MODEL, "--scheduler", address, "--quiet")
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
    def test_the_interrupt_key_leaves_nothing_behind(self, tmp_path):
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
        assert [path.name for path in tmp_path.iterdir()] == ["points.zarr"]

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

    monkeypatch.setattr(commands, "_score_demo", score_in_process)
    monkeypatch.setattr(commands.scoring, "top_rows", lambda *_, **__: [])
    result = invoke("demo", "--rows", 5000, "--directory", tmp_path)
    assert result.exit_code == 1
    assert "0 of 40 planted rows" in result.stdout
    assert result.stderr == "daskrr: only 0 of 40 planted rows were found\n"
    assert (tmp_path / "daskrr-demo.png").exists()


def listening(pid):
    """Local addresses, in the kernel's notation, on which a process accepts connections."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


class TestClusters:
    @pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs the /proc of Linux")
    def test_the_embedded_cluster_listens_on_the_loopback_only(self):
        with clusters.connect(workers=1, echo=lambda line: None) as client:
            pids = [os.getpid(), *client.run(os.getpid).values()]
            assert len(pids) == 2
            assert [listening(pid) for pid in pids] == [{"0100007F"}] * 2
            assert set(client.nthreads().values()) == {1}
            limits = [worker["memory_limit"] for worker in client.scheduler_info()["workers"].values()]
            assert all(limit > 0 for limit in limits)
        assert not Path(f"/proc/{pids[1]}").exists()

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
            ({"scheduler": "tcp://127.0.0.1:1", "workers": 2}, "not one that runs already"),
        ],
    )
    def test_impossible_clusters(self, options, message):
        with pytest.raises(errors.InvalidParameter, match=message), clusters.connect(**options):
            pass
