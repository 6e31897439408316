"""Secrets that must not be told, stores and models that must not run anything, and ports that nobody else reaches."""

import contextlib
import http.server
import io
import ipaddress
import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import obstore
import psutil
import pytest
import zarr
from damage import KERNEL, N_LANDMARKS, RIDGE, chunk_files, contents, flip, points, score, shorten_pauses, stored
from strategies import forge
from variants import slow_but
from zarr.codecs import Crc32cCodec, ZstdCodec

import daskrr
from daskrr import machine
from daskrr.apps import clusters
from daskrr.apps.convert import convert
from daskrr.errors import DamagedRecord, DaskrrError, InvalidData
from daskrr.jobs import reader
from daskrr.jobs.verification import repair, verify
from daskrr.storage import retry
from daskrr.storage.output import Output, folder_of
from daskrr.storage.records import Records

GENEROUS = 120
SECRETS = ("PASSW0RD", "T0KEN", "S3CRET", "secret-of-the-test")
COMMAND = [sys.executable, "-m", "daskrr.apps.cli"]
MODEL = ["--kernel", "gaussian", "--length-scale", "1.5", "--ridge", "1e-2", "--landmarks", "20", "--seed", "0"]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


def leaks(text):
    return [secret for secret in SECRETS if secret in text]


def told_by(folder):
    """All that is on storage below a folder, as text."""
    return "\n".join(path.read_bytes().decode("latin-1") for path in Path(folder).rglob("*") if path.is_file())


def complaint(action):
    """The whole traceback of a failure."""
    with pytest.raises(DaskrrError) as caught:
        action()
    return "".join(traceback.format_exception(caught.value))


# --- Addresses ----------------------------------------------------------------------------------------

ADDRESSES = [
    "http://me:PASSW0RD@127.0.0.1:9/x.zarr?token=T0KEN",
    "http://me:PASSW0RD/T0KEN@127.0.0.1:9/x.zarr",
    "https://127.0.0.1:9/x.zarr?sig=T0KEN&key=S3CRET",
    "s3://me:PASSW0RD@points/x.zarr?token=T0KEN",
    "s3://points/x.zarr?token=T0KEN",
    "memory://me:PASSW0RD@x?token=T0KEN",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses__are_told_without_their_secrets(address, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "daskrr")
    X = points(50)
    told = [
        complaint(lambda: daskrr.leverage_scores(address, KERNEL, RIDGE, N_LANDMARKS, progress=False)),
        complaint(lambda: score(address, tmp_path / "out.zarr")),
        complaint(lambda: score(X, address)),
        complaint(lambda: daskrr.open_scores(address)),
        complaint(lambda: verify(address)),
        complaint(lambda: reader.status(address)),
        complaint(lambda: daskrr.load(address)),
        caplog.text,
    ]
    assert leaks("".join(told)) == []
    assert list(tmp_path.iterdir()) == []


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files to who knows the password and the token."""

    def translate_path(self, path):
        return super().translate_path(path.replace("?token=T0KEN", ""))

    def send_head(self):
        if "T0KEN" not in self.path or "Basic" not in self.headers.get("Authorization", ""):
            self.send_error(403)
            return None
        return super().send_head()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    """Address of the files of a folder, with a password and a token."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: Handler(*given, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://me:PASSW0RD@127.0.0.1:{server.server_port}/X?token=T0KEN"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_commands__tell_no_secrets_of_addresses_that_they_read(damaged, tmp_path):
    source = stored(tmp_path / "X", points(), compressors=[ZstdCodec(level=1), Crc32cCodec()])
    if damaged:
        flip(chunk_files(source)[3])
    with served(tmp_path) as address:
        command = [*COMMAND, "score", address, str(tmp_path / "out.zarr"), *MODEL, "--workers", "1", "--debug"]
        command += ["--missing-chunks", "fill", "--block-rows", "50"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS)
        assert found.returncode == (2 if damaged else 0), found.stderr
        assert leaks(found.stdout + found.stderr) == []
        assert "http://***@127.0.0.1" in (found.stderr if damaged else found.stdout + told_by(tmp_path / "out.zarr"))
    assert leaks(told_by(tmp_path / "out.zarr")) == []
    for command in () if damaged else ("status", "verify"):
        shown = subprocess.run(
            [*COMMAND, command, str(tmp_path / "out.zarr"), "--debug"], capture_output=True, text=True
        )
        assert leaks(shown.stdout + shown.stderr) == []


# --- Credentials --------------------------------------------------------------------------------------


def in_bucket(store):
    """All that is on storage in a bucket, as text."""
    keys = [one["path"] for batch in obstore.list(store) for one in batch if "/c/" not in one["path"]]
    return "\n".join(bytes(obstore.get(store, key).bytes()).decode("latin-1") for key in keys)


@pytest.mark.slow
def test_credentials__of_the_environment_stay_there(bucket, tmp_path, caplog, capfd, monkeypatch):
    caplog.set_level(logging.DEBUG, "daskrr")
    store = obstore.store.from_url(bucket, client_options={"allow_http": True})
    for file in [stored(tmp_path / "X", points()) / "zarr.json", *chunk_files(tmp_path / "X")]:
        obstore.put(store, f"X/{file.relative_to(tmp_path / 'X')}", file.read_bytes())
    summary = score(f"{bucket}/X", f"{bucket}/out.zarr")
    result = daskrr.leverage_scores(f"{bucket}/X", KERNEL, RIDGE, N_LANDMARKS, random_state=0, progress=False)
    told = [repr(summary), repr(result), result._repr_html_(), repr(daskrr.open_scores(f"{bucket}/out.zarr"))]
    told += [repr(reader.status(f"{bucket}/out.zarr")), repr(Records(f"{bucket}/out.zarr")), in_bucket(store)]
    told += [complaint(lambda: score(f"{bucket}/nothing", f"{bucket}/other.zarr"))]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(retry, "PAUSES", (0.0,))
    told += [complaint(lambda: reader.status(f"{bucket}/out.zarr"))]
    told += [caplog.text, *capfd.readouterr()]
    assert leaks("".join(told)) == []
    assert "s3://points/X" in told[0]


@pytest.mark.slow
def test_storage_options__are_told_nowhere(bucket, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG, "daskrr")
    options = {"key": "me", "secret": "S3CRET", "client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    array = zarr.create_array(
        f"{bucket}/fsspec.zarr", shape=(250, 3), chunks=(50, 3), dtype=float, storage_options=options
    )  # fmt: skip
    array[:] = points()
    X = zarr.open_array(f"{bucket}/fsspec.zarr", mode="r", storage_options=options)
    summary = score(X, tmp_path / "out.zarr")
    result = daskrr.leverage_scores(X, KERNEL, RIDGE, N_LANDMARKS, random_state=0, progress=False)
    told = [repr(summary), repr(result), repr(result.scores), repr(daskrr.open_scores(tmp_path / "out.zarr").summary)]
    obstore.delete(obstore.store.from_url(bucket, client_options={"allow_http": True}), "fsspec.zarr/c/2/0")
    told += [complaint(lambda: result.scores.compute())]
    told += [told_by(tmp_path / "out.zarr"), caplog.text, *capfd.readouterr()]
    assert leaks("".join(told)) == []


# --- Hostile models and records -----------------------------------------------------------------------


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.zarr"
    X = points(60)
    daskrr.NystromKernelRidge(KERNEL, RIDGE, 20, random_state=0).fit(X, X[:, 0]).save(path)
    assert np.isfinite(daskrr.load(path).predict(X)).all()
    return path


def edited(path, edit):
    """Change what is told of a model: its attributes, and its summary."""

    def change(manifest):
        metadata = json.loads(manifest["metadata"]["zarr.json"])
        edit(metadata["attributes"]["daskrr"])
        edit(manifest["summary"])
        manifest["metadata"]["zarr.json"] = json.dumps(metadata)

    forge(path, change)


HOSTILE_SPECS = [
    {"kernel": "function", "function": "os:system"},
    {"kernel": "function", "function": "builtins:eval"},
    {"kernel": "__reduce__", "args": ["os.system", "id"]},
    {"kernel": "gaussian", "__class__": "subprocess.Popen", "length_scale": 1.0},
    {"kernel": "gaussian", "length_scale": {"__reduce__": ["os.system", "id"]}},
    {"kernel": "sum", "parts": [{"kernel": "function", "function": "posix:system"}]},
    ["gaussian"],
    "gaussian",
]


@pytest.mark.parametrize("spec", HOSTILE_SPECS, ids=str)
def test_model__with_a_hostile_kernel_is_refused(spec, model):
    edited(model, lambda about: about.update(kernel=spec))
    with pytest.raises(DaskrrError):
        daskrr.load(model)


@pytest.mark.parametrize("where", [{"filters": [{"id": "pickle"}]}, {"compressor": {"id": "pickle"}}])
def test_pickles__in_a_store_are_not_opened(where, model, tmp_path):
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.is_dir()
    mark.rmdir()
    metadata = {"zarr_format": 2, "shape": [20, 3], "chunks": [20, 3], "dtype": "<f8", "order": "C", "fill_value": 0.0}
    metadata = json.dumps(metadata | {"filters": None, "compressor": None} | where)
    for path in (model / folder_of(Output(model).commit.current) / "landmarks", tmp_path / "X"):
        shutil.rmtree(path, ignore_errors=True)
        (path / "c" / "0").mkdir(parents=True)
        (path / ".zarray").write_text(metadata)
        for chunk in ("0.0", "c/0/0"):
            (path / chunk).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(DaskrrError, match="damaged"):
        daskrr.load(model)
    forge(model, lambda manifest: manifest["metadata"].update({"landmarks/zarr.json": metadata}))
    with pytest.raises(InvalidData, match=r"landmarks/zarr\.json of .*model\.zarr"):
        daskrr.load(model)
    with pytest.raises(DaskrrError):
        score(tmp_path / "X", tmp_path / "out.zarr")
    for name in ("x.npy", "x.npz"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
        with pytest.raises(DaskrrError):
            convert(tmp_path / name, tmp_path / "y.zarr", progress=False)
    assert not mark.exists()


def test_records__that_are_pickles_are_not_opened(tmp_path):
    source, output, mark = stored(tmp_path / "X", points()), tmp_path / "out.zarr", tmp_path / "mark"
    score(source, output)
    whole, records = contents(output), output / ".daskrr" / "records"
    for record in (records / "commit.record+versions").iterdir():
        record.write_bytes(pickle.dumps(Bomb(mark)))
    assert np.isfinite(daskrr.open_scores(output)["scores"][...]).all()
    for record in (records / "commit-copy.record+versions").iterdir():
        record.write_bytes(pickle.dumps(Bomb(mark)))
    for action in (daskrr.open_scores, reader.status, daskrr.load, lambda path: score(source, path)):
        with pytest.raises(DamagedRecord, match=r"Nothing was deleted\. Tell what is left with daskrr verify"):
            action(output)
    assert "its checksum does not match" in " ".join(verify(output))
    repair(output)
    assert verify(output) == []
    assert contents(output) == whole
    assert not mark.exists()


@pytest.fixture
def victim(tmp_path):
    """A folder of somebody else, with files whose names could be ours."""
    path = tmp_path / "victim"
    path.mkdir()
    names = ("zarr.json", "precious", "job.record")
    for name in names:
        (path / name).write_text("mine")
    yield path
    assert {file.name: file.read_text() for file in path.iterdir()} == dict.fromkeys(names, "mine")


@pytest.mark.parametrize("links", slow_but([True, False], True))
@pytest.mark.parametrize("name", slow_but(["../victim", "../../{}/victim", "/{}/victim", "link"], "../victim", "link"))
def test_view__does_not_lead_out_of_its_store(name, links, tmp_path, victim, monkeypatch):
    """What was shown is deleted when something else is shown, and the record of it may be anybody's."""
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    score(source, output)
    (output / "link").symlink_to(victim)
    name = name.format(str(tmp_path).lstrip("/"))
    keys = [f"{name}/precious", f"{name}/zarr.json"]
    Output(output).records.write("view", {"names": [], "keys": keys, "generation": None})
    if not links:
        monkeypatch.setattr(machine, "make_link", lambda target, link: False)
    with contextlib.nullcontext() if links else pytest.raises(InvalidData, match=r"leads out of .*out\.zarr"):
        score(source, output, overwrite=True)


@pytest.mark.parametrize("name", slow_but(["../victim", "../../{}/victim", "/{}/victim", "link"], "/{}/victim", "link"))
@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_manifest__does_not_lead_out_of_its_store(links, name, tmp_path, victim, monkeypatch):
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    score(source, output)
    (output / "link").symlink_to(victim)
    name = name.format(str(tmp_path).lstrip("/"))
    forge(output, lambda manifest: manifest["metadata"].update({f"{name}/precious": "yours", f"{name}/zarr.json": "{"}))
    if not links:
        monkeypatch.setattr(machine, "make_link", lambda target, link: False)
    for action in (daskrr.open_scores, lambda path: score(source, path, overwrite=True), repair):
        with contextlib.suppress(DaskrrError):
            action(output)


def test_generations__that_are_links_do_not_lead_out_of_their_store(tmp_path, victim):
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    score(source, output)
    for name in ("generations", "records"):
        (output / ".daskrr" / name / "000000-0123abcd").symlink_to(victim)
    with pytest.raises(InvalidData, match=r"leads out of .*out\.zarr"):
        score(source, output, overwrite=True)


# --- Ports --------------------------------------------------------------------------------------------


def open_ports(process):
    """Addresses at which a process and all that it started listen."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {link.laddr for link in one.net_connections("inet") if link.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_clusters_that_we_start__listen_on_loopback_alone(workers):
    here = psutil.Process()
    with socket.create_server(("0.0.0.0", 0)) as other:
        assert other.getsockname()[:2] in {tuple(one) for one in open_ports(here)}
    before = open_ports(here)
    with contextlib.redirect_stderr(io.StringIO()), clusters.connect(workers=workers):
        ports = open_ports(here) - before
    assert len(ports) >= 2 + workers
    assert all(ipaddress.ip_address(address.ip).is_loopback for address in ports), ports
