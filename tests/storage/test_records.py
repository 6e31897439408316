"""Records come back as they were written, or not at all: after kills, races, damage and answers that got lost."""

import http.client
import http.server
import itertools
import logging
import math
import os
import pickle
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import strategies as st
from processes import GENEROUS, count_up, create_each, race, replace_each, replace_forever, running, write_forever
from variants import examples, slow_but

from daskrr.errors import DamagedRecord, InvalidData, InvalidParameter, StoreFailed
from daskrr.storage import local, retry, versions
from daskrr.storage import record_format as frames
from daskrr.storage.medium import open_medium
from daskrr.storage.records import Records, name_of

DTYPES = ["bool", "int8", "<u2", ">i4", "int64", "uint64", "float16", "float32", "float64", ">f8"]
CONTENT = {"rows": [0, 100], "sum": 0.1, "label": "β", "none": None, "array": np.arange(6.0).reshape(2, 3)}
COUNTER = itertools.count()


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "job")
    return f"{request.getfixturevalue('bucket')}/job-{next(COUNTER)}"


@pytest.fixture
def records(root: str) -> Records:
    return Records(root)


def is_same(one: object, other: object) -> bool:
    """Equal to the bit, types included; tuples are equal to lists."""
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return alike and one.flags.f_contiguous == other.flags.f_contiguous
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(other) is list and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and type(other) is float:
        return (math.isnan(one) and math.isnan(other)) or one.hex() == other.hex()
    return type(one) is type(other) and one == other


def stored(content: object, name: str = "a") -> np.ndarray:
    return np.concatenate(frames.encode(name, content).parts)


texts = st.text(max_size=8) | st.sampled_from(["$", "$array", "$$array", "\udcff", "a\udcff"])
arrays = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | arrays | arrays.map(np.transpose)
contents = st.dictionaries(
    texts,
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=10,
    ),
    max_size=4,
)


@examples(12, 50, contents)
def test_decode__gives_back_what_was_encoded(content: dict) -> None:
    assert is_same(content, frames.decode("a", stored(content)))


def test_encode__does_not_copy_contiguous_arrays() -> None:
    array = np.ones((100, 200))
    for one in (array, array.T, array[10:20]):
        assert any(np.shares_memory(part, array) for part in frames.encode("a", {"one": one}).parts)


def test_encode__takes_views_and_read_only_arrays() -> None:
    array = np.arange(24.0).reshape(4, 6)
    array.flags.writeable = False
    content = {"strided": array[::2, ::3], "reversed": array[::-1], "broadcast": np.broadcast_to(array[0], (3, 6))}
    found = frames.decode("a", stored(content))
    for name, one in content.items():
        np.testing.assert_array_equal(found[name], one)
        assert found[name].flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        {1: 2},
        {"a": {None: 1}},
        {"a": {1, 2}},
        {"a": b"bytes"},
        {"a": np.int64(3)},
        {"a": np.array([object()])},
        {"a": np.array(["text"])},
        {"a": np.array([1j])},
        {"a": np.ma.masked_array([1.0, 2.0], [True, False])},
        {"a": "\ud800\udc00"},
        {"a": 10**5000},
    ],
)
def test_encode__refuses_what_would_not_come_back(value: dict) -> None:
    with pytest.raises(InvalidParameter, match="cannot be recorded"):
        frames.encode("a", value)


def test_encode__refuses_what_is_not_a_dict() -> None:
    with pytest.raises(InvalidParameter, match="must be a dict, got a list"):
        frames.encode("a", [1])


def test_encode__refuses_what_holds_itself() -> None:
    endless: list = []
    endless.append(endless)
    with pytest.raises(InvalidParameter, match="cannot be recorded"):
        frames.encode("a", {"a": endless})


def test_write__is_read_back(records: Records) -> None:
    assert records.read("state/landmarks") is None
    assert records.read_version("state/landmarks") is None
    assert records.write("state/landmarks", CONTENT) > 200
    assert is_same(CONTENT, records.read("state/landmarks"))
    records.write("state/landmarks", {})
    assert records.read("state/landmarks") == {}


def test_write__keeps_large_arrays(records: Records) -> None:
    array = np.random.default_rng(0).random((2048, 1024))
    assert records.write("gram", {"gram": array}) - array.nbytes < 300
    found = records.read("gram")["gram"]
    np.testing.assert_array_equal(found, array)
    assert found.flags.aligned
    assert found.flags.writeable


def test_init__creates_nothing(tmp_path: Path) -> None:
    records = Records(tmp_path / "job")
    assert records.read("a") is None
    assert records.names() == []
    assert records.replace("a", {}, "1-0") is False
    records.delete("")
    assert not (tmp_path / "job").exists()


def test_records__travel_by_address(records: Records) -> None:
    records.write("a", {"b": 1})
    travelled = pickle.dumps(records)
    assert pickle.loads(travelled).read("a") == {"b": 1}
    assert len(travelled) < 300
    assert b"secret" not in travelled


def test_create__only_once(records: Records) -> None:
    assert records.create("a/b", {"first": True})
    assert not records.create("a/b", {"first": False})
    assert records.read("a/b") == {"first": True}
    records.write("c", {"first": True})
    assert not records.create("c", {"first": False})
    assert records.read("c") == {"first": True}


@pytest.mark.parametrize("first", slow_but(["write", "create"], "write"))
def test_replace__needs_the_version_that_is_there(records: Records, first: str) -> None:
    assert not records.replace("a", {}, "1-00")
    getattr(records, first)("a", {"n": 0})
    versions = []
    for number in range(1, 40):
        content, version = records.read_version("a")
        assert content == {"n": number - 1}
        assert records.replace("a", {"n": number}, version)
        versions.append(version)
    assert len(set(versions)) == len(versions)
    for version in versions:
        assert not records.replace("a", {"n": -1}, version)
        assert records.read("a") == {"n": 39}
    assert not records.create("a", {})
    records.write("a", {"n": 100})
    assert records.read("a") == {"n": 100}
    assert records.names() == ["a"]


def test_replace__tells_equal_contents_apart(records: Records) -> None:
    records.create("a", {"n": 0})
    _, version = records.read_version("a")
    assert records.replace("a", {"n": 0}, version)
    assert not records.replace("a", {"n": 1}, version)


def test_replace__keeps_few_old_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SECONDS_KEPT", -1.0)
    records = Records(tmp_path)
    records.create("a", {"n": 0})
    for number in range(100):
        assert records.replace("a", {"n": number}, records.read_version("a")[1])
    assert len(list((tmp_path / "a.record+versions").iterdir())) <= versions.KEPT + 1


def test_names__are_sorted_and_below_a_prefix(records: Records) -> None:
    for name in ("pass1/block-10", "pass1/block-1", "pass1", "pass10/x", "a.record.b/c"):
        records.write(name, {})
    records.create("pass1/lease", {})
    below = ["pass1", "pass1/block-1", "pass1/block-10", "pass1/lease"]
    assert records.names() == sorted([*below, "pass10/x", "a.record.b/c"])
    assert records.names("pass1") == records.names("pass1/") == below
    assert records.names("pass1/block-1") == ["pass1/block-1"]
    assert records.names("nothing") == []


def test_delete__takes_what_is_below_and_nothing_else(records: Records) -> None:
    records.delete("nothing")
    for name in ("pass1/block-1", "pass1", "pass10/x", "other"):
        records.write(name, {})
    records.create("pass1/lease", {})
    records.replace("pass1/lease", {}, records.read_version("pass1/lease")[1])
    records.delete("pass1")
    assert records.names() == ["other", "pass10/x"]
    assert records.create("pass1/lease", {"anew": True})
    records.delete("")
    assert records.names() == []


def test_delete__leaves_files_of_others_and_takes_leftovers(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write("a/b", {})
    theirs = [tmp_path / "points.csv", tmp_path / "a" / "NOTES.record", tmp_path / "my.record" / "file"]
    theirs[2].parent.mkdir()
    for path in theirs:
        path.write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path.parent)
    (tmp_path / "a" / "b.record+0123456789abcdef").write_bytes(b"left by a killed writer")
    assert records.names() == ["a/b"]
    records.delete("")
    assert [path.read_text() for path in theirs] == ["theirs"] * 3
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["NOTES.record"]


def test_delete__does_not_follow_links(tmp_path: Path) -> None:
    records, others = Records(tmp_path / "job"), Records(tmp_path / "others")
    others.write("a", {})
    records.write("b/c", {})
    (tmp_path / "job" / "link").symlink_to(tmp_path / "others")
    for prefix in ("link", ""):
        records.delete(prefix)
        assert others.names() == ["a"]
    assert records.names() == []


@pytest.mark.parametrize(
    "name",
    ["", "/", "/etc/passwd", "..", "a/../b", "a/./b", "a//b", "a/", "A", "a b", "a\\b", "a\n", "é", "a.record",
     "a+b", "a" * 201, "a\0", "~", "%2e%2e"],
)  # fmt: skip
def test_names__that_are_not_plain_are_refused(tmp_path: Path, name: str) -> None:
    records = Records(tmp_path / "job")
    for work in (records.read, records.read_version, lambda n: records.write(n, {}), lambda n: records.create(n, {})):
        with pytest.raises(InvalidParameter, match="plain words"):
            work(name)
    with pytest.raises(InvalidParameter, match="plain words"):
        records.replace(name, {}, "1-0")
    if name not in ("", "/", "a/"):
        with pytest.raises(InvalidParameter, match="plain words"):
            records.delete(name)
    assert not (tmp_path / "job").exists()


def test_read__notices_every_flipped_and_missing_byte(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write("a/b", CONTENT | {"array": np.arange(3.0)})
    path = tmp_path / "a" / "b.record"
    whole = path.read_bytes()
    flipped = [bytearray(whole) for _ in whole]
    for place, damaged in enumerate(flipped):
        damaged[place] ^= 1 << place % 8
    for damaged in (*flipped, *(whole[:length] for length in range(len(whole))), whole + b"\0", b"\0" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(DamagedRecord, match=r"record 'a/b' of .* is damaged"):
            records.read("a/b")
    path.write_bytes(whole)
    assert records.read("a/b")["rows"] == [0, 100]


def test_read__notices_damage_on_s3(bucket: str) -> None:
    records = Records(f"{bucket}/damaged")
    records.write("a", CONTENT)
    content, _ = records.peek("a")
    open_medium(f"{bucket}/damaged").write("a.record", content[:-1].tobytes())
    with pytest.raises(DamagedRecord, match=r"record 'a' of s3://points/damaged is damaged: \d+ of its \d+ bytes"):
        records.read("a")


def _reframed(text: bytes, version: int = frames.FORMAT, magic: bytes = frames.MAGIC) -> bytes:
    total = frames.HEADER.size + len(text) + 4
    body = frames.HEADER.pack(magic, version, b"\0" * 16, len(text), total) + text
    return body + frames.CHECKSUM.pack(google_crc32c.value(body))


def test_read__refuses_other_formats(tmp_path: Path) -> None:
    (tmp_path / "a.record").write_bytes(_reframed(b"{}", version=1))
    with pytest.raises(InvalidData, match=r"record 'a' of .* has format 1; this version reads format 2"):
        Records(tmp_path).read("a")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"3", b"{", b"\xff", b"[" * 10**5, b"{}", b'{"name":"a"}', b'{"content":{}}',
        b'{"name":"a","content":[]}', b'{"name":["a"],"content":{}}', b'{"name":"b","content":{}}',
        b'{"name":"a","content":{"a":{"$array":["|O8",[1],"C",0]}}}',
        b'{"name":"a","content":{"a":{"$array":["<f8",[1],"C",0]}}}',
        b'{"name":"a","content":{"a":{"$array":["<f8",[-1],"C",0]}}}',
        b'{"name":"a","content":{"a":{"$array":["|u1",[1],"C",-1]}}}',
        b'{"name":"a","content":{"a":{"$array":["<f8",["1"],"C",0]}}}',
        b'{"name":"a","content":{"a":{"$array":["<f8",[1]]}}}',
        b'{"name":"a","content":{"a":{"$array":{"x":1}}}}',
        b'{"name":"a","content":{"a":{"$array":["<f8",[1000000000000000000,1000000000000000000],"C",0]}}}',
    ],
)  # fmt: skip
def test_read__believes_nothing_that_a_frame_says(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.record").write_bytes(_reframed(text))
    with pytest.raises(DamagedRecord, match="is damaged: it"):
        Records(tmp_path).read("a")


def test_read__knows_a_record_by_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.record").write_bytes(_reframed(b"{}", magic=b"\x93NUMPY\x01\0"))
    with pytest.raises(DamagedRecord, match="does not begin like a record"):
        Records(tmp_path).read("a")


# --- Damage -------------------------------------------------------------------------------------------


def stored_keys(root: str, name: str) -> list[str]:
    """Where a record and its old versions are, the one that counts last."""
    return sorted(key for key in open_medium(root).stored("") if name_of(key) == name)


def damage(root: str, name: str, content: bytes) -> None:
    open_medium(root).write(stored_keys(root, name)[-1], content)


@pytest.mark.parametrize("first", ["write", "create"])
def test_read__notices_a_whole_record_in_the_place_of_a_sibling(records: Records, first: str) -> None:
    for name in ("sums/1", "sums/2"):
        getattr(records, first)(name, {"n": 1})
    damage(records.root, "sums/1", records.peek("sums/2")[0].tobytes())
    with pytest.raises(DamagedRecord, match=r"'sums/1' of .* is damaged: it is the record 'sums/2'") as caught:
        records.read("sums/1")
    assert caught.value.name == "sums/1"
    assert records.read("sums/2") == {"n": 1}


def test_find__logs_what_is_damaged_and_takes_it_for_none(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    records.write("a", {"n": 1})
    records.write("b", {"n": 2})
    assert (records.find("a"), records.has("a"), records.find("c"), records.has("c")) == ({"n": 1}, True, None, False)
    assert not caplog.records
    damage(records.root, "a", b"torn")
    assert records.find("a") is None
    assert not records.has("a")
    assert caplog.text.count("the record 'a' of") == 2
    assert "it has 4 bytes, fewer than any record. It counts as none." in caplog.text
    assert records.names() == ["a", "b"]


def test_damaged__tells_what_is_wrong_with_which_record(records: Records) -> None:
    for name in ("sums/1", "sums/2", "job"):
        records.write(name, {"n": 1})
    records.create("lease", {"n": 0})
    records.replace("lease", {"n": 1}, records.read_version("lease")[1])
    assert records.damaged() == {}
    damage(records.root, "sums/1", records.peek("sums/2")[0].tobytes())
    damage(records.root, "lease", records.peek("lease")[0][:-1].tobytes())
    found = {name_of(key): fault for key, fault in records.damaged().items()}
    assert set(found) == {"lease", "sums/1"}
    assert found["sums/1"] == "it is the record 'sums/2'"
    assert "bytes are there" in found["lease"]
    assert [name_of(key) for key in records.damaged("sums")] == ["sums/1"]


def test_damaged__reads_old_versions_too(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.create("a", {"n": 0})
    for number in range(1, 40):
        records.replace("a", {"n": number}, records.read_version("a")[1])
    assert records.damaged() == {}, "the first version, which is emptied with time, is whole"
    oldest = stored_keys(str(tmp_path), "a")[0]
    open_medium(tmp_path).write(oldest, b"flipped")
    assert list(records.damaged()) == [oldest]
    assert records.read("a") == {"n": 39}


@pytest.mark.parametrize("first", ["write", "create"])
@pytest.mark.parametrize("kind", ["empty", "torn", "flipped", "sibling"])
def test_replace__takes_the_version_of_a_damaged_record(records: Records, first: str, kind: str) -> None:
    for name in ("a", "b"):
        getattr(records, first)(name, {"n": 0})
    whole = records.peek("a")[0].tobytes()
    flipped = bytearray(whole)
    flipped[20] ^= 1  # in the number by which writings are told apart
    sibling = records.peek("b")[0].tobytes()
    damage(records.root, "a", {"empty": b"", "torn": whole[:50], "flipped": bytes(flipped), "sibling": sibling}[kind])
    with pytest.raises(DamagedRecord, match="is damaged"):
        records.read_version("a")
    _, version = records.peek("a")
    assert not records.create("a", {"n": 1}), "a damaged record is there: to be replaced, by who has seen it"
    assert not records.replace("a", {"n": 1}, "1-00")
    assert records.replace("a", {"n": 2}, version)
    assert not records.replace("a", {"n": 3}, version)
    assert records.read("a") == {"n": 2}


@pytest.mark.parametrize("first", ["write", "create"])
def test_write__heals_a_damaged_record(records: Records, first: str) -> None:
    getattr(records, first)("a", {"n": 0})
    damage(records.root, "a", b"")
    records.write("a", {"n": 1})
    assert records.read("a") == {"n": 1}
    damage(records.root, "a", b"torn")
    records.delete("a")
    assert records.read("a") is None
    assert records.create("a", {"n": 2})
    assert records.damaged() == {}


@pytest.mark.parametrize("work", slow_but([write_forever, replace_forever], write_forever))
def test_write__leaves_the_old_or_the_new_when_killed(tmp_path: Path, work: object) -> None:
    records, moments = Records(tmp_path), random.Random(0)
    size = 20_000
    records.create("data", {"number": 0, "array": np.zeros(size)})
    if work is write_forever:
        records.delete("")
        records.write("data", {"number": 0, "array": np.zeros(size)})
    numbers = [0]
    for _ in range(40):
        arguments = (str(tmp_path), size) if work is write_forever else (str(tmp_path),)
        with running(work, *arguments) as process:
            _wait_until_moved(records, numbers[-1])
            time.sleep(moments.uniform(0, 0.01))
            process.kill()
            process.join(GENEROUS)
        found = records.read("data")
        numbers.append(found["number"])
        np.testing.assert_array_equal(found["array"], np.full(size, float(found["number"])))
        assert records.names() == ["data"]
    assert numbers == sorted(set(numbers))
    left = [path for path in tmp_path.iterdir() if path.name not in ("data.record", "data.record+versions")]
    assert left, "no kill came in the middle of a write"
    records.delete("data")
    assert list(tmp_path.iterdir()) == []


def _wait_until_moved(records: Records, number: int) -> None:
    deadline = time.monotonic() + GENEROUS
    while records.read("data")["number"] == number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_create__has_one_winner_among_processes(root: str) -> None:
    rounds = 60 if root.startswith("/") else 10
    won = np.array(race(create_each, 8, root, rounds))
    np.testing.assert_array_equal(won.sum(axis=0), 1)
    assert len(set(won.argmax(axis=0))) > 1, "always the same process won, so they did not race"


@pytest.mark.parametrize("first", slow_but(["write", "create"], "write"))
def test_replace__has_one_winner_among_processes(root: str, first: str) -> None:
    rounds = 40 if root.startswith("/") else 8
    getattr(Records(root), first)("shared", {"count": 0})
    won = np.array(race(replace_each, 8, root, rounds))
    np.testing.assert_array_equal(won.sum(axis=0), 1)
    assert Records(root).read("shared") == {"count": rounds}


@pytest.mark.parametrize("root", ["local", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_replace__loses_no_update_of_many_processes(root: str) -> None:
    rounds = 25 if root.startswith("/") else 3
    Records(root).write("shared", {"count": 0})
    assert race(count_up, 8, root, rounds) == [rounds] * 8
    assert Records(root).read("shared") == {"count": 8 * rounds}


def test_replace__of_a_writer_that_wakes_late_does_nothing(tmp_path: Path) -> None:
    """Its number was taken, followed and forgotten meanwhile, so that its link succeeds."""
    records = Records(tmp_path)
    records.create("a", {"n": 0})
    medium = local.Files(str(tmp_path))
    seen = [medium._current_version("a")]
    for number in range(1, 60):
        assert records.replace("a", {"n": number}, records.read_version("a")[1])
        seen.append(medium._current_version("a"))
    assert not medium._link("a", frames.encode("a", {"n": -1}), 1, "")  # by a create that wakes late
    for number, identity in seen[:-1]:
        assert not medium._link("a", frames.encode("a", {"n": -1}), number + 1, identity)
        assert records.read("a") == {"n": 59}


def test_write__beside_a_replace_is_not_hidden_by_it(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write("a", {"n": 0})
    _, version = records.read_version("a")
    os.mkdir(tmp_path / "a.record+versions")  # a replace has begun
    records.write("a", {"n": 1})
    assert not records.replace("a", {"n": 2}, version)
    assert records.read("a") == {"n": 1}


def test_write__that_does_not_fit_says_so_and_changes_nothing(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write("a", {"n": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(StoreFailed, match=rf"cannot write the 16777\d+ bytes of 'a' in {tmp_path}: File too large"):
            records.write("a", {"array": np.zeros(2**21)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert records.read("a") == {"n": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["a.record"]


def test_read__of_a_place_that_fails_is_not_none(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file in the way")
    records = Records(tmp_path / "job")
    for work in (lambda: records.read("a"), records.names, lambda: records.write("a", {})):
        with pytest.raises(StoreFailed, match=r"cannot .*: Not a directory"):
            work()


@pytest.mark.parametrize("scheme", ["gs", "memory", "http", "https", "az"])
def test_init__refuses_other_stores(scheme: str) -> None:
    with pytest.raises(InvalidParameter, match=f"cannot be written to {scheme}://.* only if nobody else has") as caught:
        Records(f"{scheme}://user:hunter2@place/x?token=hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["s3://key:hun/ter2@bucket/x", "s3://bucket/x?token=hunter2", "s3://bucket/../x", "s3://bucket/a//b",
     "s3://ab", "s3://", "s3://bucket/a b", "s3://bucket/%2e%2e/x#hunter2"],
)  # fmt: skip
def test_init__refuses_addresses_with_more_than_a_place(url: str) -> None:
    with pytest.raises(InvalidParameter, match="s3://bucket/prefix, of plain letters") as caught:
        Records(url)
    assert "ter2" not in str(caught.value)


def test_init__says_how_to_get_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidParameter, match=r"pip install '\.\[s3\]' in a checkout"):
        Records("s3://bucket/x")


class Between(http.server.BaseHTTPRequestHandler):
    """Hands requests on to the store, and is as unreliable as it is told to be."""

    store = ""
    refuse: int = 0
    lose: int = 0
    ignore_conditions = False
    protocol_version = "HTTP/1.1"

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if type(self).refuse:
            type(self).refuse -= 1
            return self._answer(503, {}, b"<Error><Code>SlowDown</Code><Key>hunter2</Key></Error>")
        headers = {
            k: v for k, v in self.headers.items() if not (self.ignore_conditions and k.lower().startswith("if-"))
        }
        asked = http.client.HTTPConnection(self.store, timeout=GENEROUS)
        asked.request(self.command, self.path, body, headers)
        answer = asked.getresponse()
        told = answer.read()
        asked.close()
        if type(self).lose and self.command == "PUT":
            type(self).lose -= 1
            self.close_connection = True
            return None
        return self._answer(answer.status, dict(answer.getheaders()), told)

    do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = _hand_on

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", headers.get("Content-Length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def between(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Between]]:
    handler = type("Here", (Between,), {"store": os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(retry, "PAUSES", (0.01, 0.01))
    yield handler
    server.shutdown()
    thread.join(GENEROUS)
    server.server_close()


def test_write__goes_on_when_the_store_is_busy(
    between: type[Between], bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records(f"{bucket}/busy")
    between.refuse = 2
    with caplog.at_level(logging.WARNING, "daskrr"):
        records.write("a", {"n": 1})
    between.refuse = 2
    assert records.read("a") == {"n": 1}
    assert caplog.text.count("cannot write the") == 2
    assert "503 Service Unavailable" in caplog.text
    assert "hunter2" not in caplog.text


def test_write__gives_up_after_a_few_tries(between: type[Between], bucket: str) -> None:
    between.refuse = 100
    with pytest.raises(StoreFailed, match=r"cannot read 'a' in s3://points/busy: 503 Service Unavailable") as caught:
        Records(f"{bucket}/busy").read("a")
    assert between.refuse == 97
    told = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in told
    assert "secret-of-the-test" not in told


def test_create__knows_its_own_record_when_the_answer_got_lost(between: type[Between], bucket: str) -> None:
    records = Records(f"{bucket}/lost")
    assert records.create("first", {})
    between.lose = 1
    assert records.create("a", {"n": 0})
    assert between.lose == 0
    assert not records.create("a", {"n": 1})
    between.lose = 1
    assert records.replace("a", {"n": 2}, records.read_version("a")[1])
    assert between.lose == 0
    assert records.read("a") == {"n": 2}


def test_create__refuses_stores_that_ignore_conditions(between: type[Between], bucket: str) -> None:
    between.ignore_conditions = True
    records = Records(f"{bucket}/careless")
    with pytest.raises(StoreFailed, match="ignores conditional requests"):
        records.create("a", {})
    assert records.names() == []
    between.ignore_conditions = False
    assert records.create("a", {})


def test_read__of_a_missing_bucket_is_an_error(bucket: str) -> None:
    records = Records("s3://nobucket/x")
    for work in (lambda: records.read("a"), lambda: records.write("a", {}), records.names):
        with pytest.raises(StoreFailed, match=r"in s3://nobucket/x: 404 Not Found \(NoSuchBucket\)"):
            work()


def test_records__tell_no_secrets(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:1/")
    monkeypatch.setattr(retry, "PAUSES", (0.0,))
    records = Records(f"{bucket}/x")
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreFailed, match="cannot write the") as caught:
        records.write("a", {})
    told = repr(records) + caplog.text + "".join(traceback.format_exception(caught.value))
    assert "trying again" in told
    assert "hunter2" not in told
    assert "secret-of-the-test" not in told
