"""Input on stores that raise, deny what they have, and answer with less than they should."""

import os

import obstore
import pytest
import zarr
from damage import chunk_files, contents, nothing_published, points, score, shorten_pauses, stored
from stores import FaultyStore, Plan, Proxy
from variants import slow_but
from zarr.codecs import Crc32cCodec, ZstdCodec

from daskrr.errors import DaskrrError, InvalidData, MissingChunks
from daskrr.jobs import verification

SLOW = pytest.mark.slow
LAYOUTS = {
    "default": {},
    "uncompressed": {"compressors": None},
    "checksummed": {"compressors": [ZstdCodec(level=1), Crc32cCodec()]},
    "sharded": {"chunks": (5, 3), "shards": (25, 3)},
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


def values():
    """Every chunk begins with its fill value, and one holds nothing else."""
    X = points(250)
    X[::25] = 0.0
    X[100:125] = 0.0
    return X


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Path of the points in every layout, and what an undisturbed run makes of them."""
    folder, found = tmp_path_factory.mktemp("reference"), {}
    for name, layout in LAYOUTS.items():
        source = stored(folder / name, values(), **{"chunks": (25, 3)} | layout)
        score(source, folder / f"{name}.zarr", block_rows=50)
        found[name] = source, contents(folder / f"{name}.zarr")
    return found


# --- An S3 server behind a proxy ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(bucket, reference):
    """Its address; the points of every layout are at ``s3://points/LAYOUT``."""
    store = obstore.store.from_url(bucket, client_options={"allow_http": True})
    for name, (source, _) in reference.items():
        for file in [source / "zarr.json", *chunk_files(source)]:
            obstore.put(store, f"{name}/{file.relative_to(source)}", file.read_bytes())
    return os.environ["AWS_ENDPOINT_URL"]


@pytest.fixture
def proxy(server, monkeypatch):
    """Before the server."""
    with Proxy(server) as started:
        monkeypatch.setenv("AWS_ENDPOINT_URL", started.url)
        yield started


def test_proxy__that_fails_nothing_changes_nothing(proxy, reference, tmp_path):
    score("s3://points/default", tmp_path / "out.zarr", block_rows=50)
    assert proxy.passed > 20
    assert contents(tmp_path / "out.zarr") == reference["default"][1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 4))])
def test_server__that_fails_at_random_is_asked_again(seed, proxy, reference, tmp_path):
    proxy.plan = Plan(["503", "hang up", "cut"], seed=seed)
    score("s3://points/default", tmp_path / "out.zarr", block_rows=50)
    assert len(proxy.failed) >= 2
    assert proxy.passed > 20
    assert contents(tmp_path / "out.zarr") == reference["default"][1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 8))])
@pytest.mark.parametrize("kind", slow_but(["404", "short"], "404"))
def test_server__that_denies_or_cuts_off_chunks_at_random_gives_no_wrong_row(kind, seed, proxy, reference, tmp_path):
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    proxy.plan = Plan([kind], share=0.2, seed=seed, only="/c/")
    try:
        score(f"s3://points/{layout}", tmp_path / "out.zarr", block_rows=50)
        assert contents(tmp_path / "out.zarr") == reference[layout][1]
    except DaskrrError as error:
        assert isinstance(error, MissingChunks if kind == "404" else InvalidData), error  # noqa: PT017
        nothing_published(tmp_path / "out.zarr")
    assert proxy.failed
    assert all("/c/" in path for _, _, path in proxy.failed)


@pytest.mark.parametrize("layout", ["default", *(pytest.param(one, marks=SLOW) for one in LAYOUTS if one != "default")])
@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("404", "the chunk with row 50 of .* was never written"), ("short", "cannot read rows 50–74 of .*chunk 'c/2/0'")],
)
def test_server__that_always_denies_or_cuts_off_a_chunk_is_found_out(kind, complaint, layout, proxy, tmp_path):
    proxy.plan = Plan([kind], share=1.0, only=f"/{layout}/c/2/")
    with pytest.raises(InvalidData, match=complaint):
        score(f"s3://points/{layout}", tmp_path / "out.zarr", block_rows=50)
    assert proxy.failed
    nothing_published(tmp_path / "out.zarr")


@pytest.mark.slow
def test_server__that_is_down_is_named(proxy, tmp_path):
    proxy.plan = Plan(["503"], share=1.0)
    with pytest.raises(DaskrrError, match="s3://points/default"):
        score("s3://points/default", tmp_path / "out.zarr", block_rows=50)
    nothing_published(tmp_path / "out.zarr")


# --- A store of a user --------------------------------------------------------------------------------


def faulty(reference, layout, plan, folder):
    """The points behind a store that fails, and the file where it notes that it did."""
    array = zarr.open_array(FaultyStore(reference[layout][0], Plan([], share=0.0)), mode="r")
    plan.log = str(folder / "faults")
    array.store.plan = plan
    return array, folder / "faults"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 10))])
def test_user_store__that_raises_at_random_is_asked_again(seed, reference, tmp_path):
    X, faults = faulty(reference, "default", Plan(["os", "time", "other"], share=0.15, seed=seed), tmp_path)
    score(X, tmp_path / "out.zarr", block_rows=50)
    assert faults.exists()
    assert contents(tmp_path / "out.zarr") == reference["default"][1]


@SLOW
def test_user_store__that_raises_on_workers_is_asked_again(client, reference, tmp_path):
    X, faults = faulty(reference, "default", Plan(["os", "time", "other"], share=0.15, seed=3), tmp_path)
    score(X, tmp_path / "out.zarr", block_rows=50)
    assert faults.exists()
    assert contents(tmp_path / "out.zarr") == reference["default"][1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 10))])
@pytest.mark.parametrize("kind", ["lie", "short"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_user_store__that_lies_or_cuts_off_at_random_gives_no_wrong_row(layout, kind, seed, reference, tmp_path):
    X, faults = faulty(reference, layout, Plan([kind], share=0.3, seed=seed, only="c/"), tmp_path)
    try:
        score(X, tmp_path / "out.zarr", block_rows=50)
        assert contents(tmp_path / "out.zarr") == reference[layout][1]
        assert verification.verify(tmp_path / "out.zarr") == []
    except DaskrrError as error:
        assert isinstance(error, MissingChunks if kind == "lie" else InvalidData), error  # noqa: PT017
        nothing_published(tmp_path / "out.zarr")
    assert faults.exists()
