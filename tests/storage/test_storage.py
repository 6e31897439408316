"""The output store: whole chunks, checksums, and nothing visible before it is finished."""

import contextlib
import json
from functools import partial

import numpy as np
import pytest
import zarr
from strategies import as_zarr, score
from variants import slow_but

import daskrr
from daskrr import machine
from daskrr.errors import CheckFailed, InvalidData, InvalidParameter, LeaseHeld, LeaseLost, OutputExists
from daskrr.jobs.verification import repair, verify
from daskrr.kernels import Gaussian, Linear
from daskrr.nystrom.sampling import Uniform
from daskrr.storage import lease
from daskrr.storage.local import Files
from daskrr.storage.output import COMMIT, Output, folder_of
from daskrr.storage.records import Records
from daskrr.storage.saving import Saving, check_target, kind_of
from daskrr.storage.writing import HeldOutput, hold
from daskrr.storage.zarr_arrays import chunk_key

NAMES = ("scores", "estimate", "residual")


def rows(n=47, d=2):
    return np.random.default_rng(0).standard_normal((n, d))


def run(X=None, **options):
    options = {"block_rows": 10} | options
    return score(rows() if X is None else X, Gaussian(1.0), 0.01, 12, **options)


def stored(folder, **options):
    scored = run(**options)
    return scored, scored.result.store(folder / "out.zarr", progress=False)


def open_published(path):
    return Output(path).open("scores")[0]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def chunk_file(folder, name):
    output = folder / "out.zarr"
    return output / folder_of(Output(output).commit.current) / name / "c" / "2"


# --- Results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["numpy", "zarr"])
@pytest.mark.parametrize("dtype", slow_but(["float64", "float32"], "float32"))
def test_store__writes_what_is_computed(source, dtype, tmp_path):
    X = rows() if source == "numpy" else as_zarr(rows(), (5, 2))
    scored, _ = stored(tmp_path, X=X, dtype=dtype)
    group = open_published(tmp_path / "out.zarr")
    for name in NAMES:
        np.testing.assert_array_equal(group[name][...], getattr(scored, name))
    assert names(tmp_path) == ["out.zarr"]


@pytest.mark.parametrize(("block_rows", "height"), [(10, 10), (20, 20), (None, 47), (1000, 47)])
def test_store__aligns_chunks_with_blocks(block_rows, height, tmp_path):
    stored(tmp_path, block_rows=block_rows)
    group = open_published(tmp_path / "out.zarr")
    assert {(group[name].shape, group[name].chunks) for name in NAMES} == {((47,), (height,))}
    assert all(group[name].dtype == np.float64 and np.isnan(group[name].fill_value) for name in NAMES)


@pytest.mark.parametrize("name", slow_but(NAMES, "scores"))
def test_store__checksums_every_chunk(name, tmp_path):
    scored, _ = stored(tmp_path)
    path = chunk_file(tmp_path, name)
    intact = path.read_bytes()
    for position in range(0, len(intact), 5):
        damaged = bytearray(intact)
        damaged[position] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="checksum"):
            open_published(tmp_path / "out.zarr")[name][...]
    path.unlink()
    with pytest.raises(InvalidData, match=f"the chunk {name}/c/2 of .* is gone"):
        open_published(tmp_path / "out.zarr")[name][...]
    found = zarr.open_array(tmp_path / "out.zarr" / name, mode="r")[...]
    assert np.isnan(found[20:30]).all()
    assert np.isfinite(np.delete(found, slice(20, 30))).all()
    assert np.isfinite(scored.scores).all()


def test_store__keeps_parameters_versions_and_figures(tmp_path):
    X = as_zarr(rows(), (5, 2), str(tmp_path / "in.zarr"))
    scored, summary = stored(tmp_path, X=X, sampling=Uniform(sketch_ridge=1e-3), random_state=8)
    kept = dict(zarr.open_group(tmp_path / "out.zarr", mode="r").attrs["daskrr"])
    parameters = kept["parameters"]
    assert {key: parameters[key] for key in ("ridge", "n_landmarks", "sampling", "sketch_ridge", "random_state")} == {
        "ridge": 0.01, "n_landmarks": 12, "sampling": "uniform", "sketch_ridge": 1e-3, "random_state": 8,
    }  # fmt: skip
    assert (parameters["dtype"], parameters["block_rows"]) == ("float64", 10)
    assert "in.zarr" in parameters["input"]
    assert daskrr.kernels.from_spec(parameters["kernel"]) == Gaussian(1.0)
    assert set(kept["versions"]) >= {"daskrr", "numpy", "scipy", "dask", "distributed", "zarr"}
    assert kept["versions"]["zarr"] == zarr.__version__
    assert (kept["n_rows"], kept["n_features"], kept["rank"]) == (47, 2, scored.result.rank)
    assert kept["sum_of_scores"] == pytest.approx(scored.scores.sum(), rel=1e-12)
    assert kept["sketch_dimension"] == scored.result.sketch_dimension
    assert summary["output"] == str(tmp_path / "out.zarr")
    assert (kept.pop("format"), kept.pop("kind")) == (2, "scores")
    assert kept.pop("generation") == Output(tmp_path / "out.zarr").commit.current
    assert json.loads(json.dumps({key: summary[key] for key in kept})) == kept


def test_store__lists_the_highest_rows(tmp_path):
    scored, summary = stored(tmp_path)
    order = np.argsort(-scored.estimate, kind="stable")[:10]
    assert [one["row"] for one in summary["top"]] == order.tolist()
    assert [one["scores"] for one in summary["top"]] == scored.scores[order].tolist()


def test_store__can_be_repeated(tmp_path):
    result = run().result
    result.store(tmp_path / "a.zarr", progress=False)
    result.store(tmp_path / "b.zarr", progress=False)
    for name in NAMES:
        np.testing.assert_array_equal(*(open_published(tmp_path / path)[name][...] for path in ("a.zarr", "b.zarr")))


def test_store__refuses_scores_that_do_not_add_up(tmp_path):
    result = run().result
    result.sketch_dimension *= 1 + 1e-6
    with pytest.raises(CheckFailed, match=r"sum to .* effective dimension"):
        result.store(tmp_path / "out.zarr", progress=False)
    assert names(tmp_path) == []


# --- Targets ------------------------------------------------------------------------------------------


def foreign(kind, path):
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    elif kind == "group":
        zarr.create_group(str(path)).attrs["mine"] = True
    elif kind == "array":
        as_zarr(rows(), (5, 2), str(path))
    elif kind == "link":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "broken":
        path.mkdir()
        (path / "zarr.json").write_text("{")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "group", "array", "link", "broken"])
def test_saving__never_touches_what_is_not_ours(kind, overwrite, tmp_path):
    target = tmp_path / "out.zarr"
    foreign(kind, target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExists, match="is not a result of daskrr"):
        run().result.store(target, overwrite=overwrite, progress=False)
    assert sorted(tmp_path.rglob("*")) == before


def save(target, overwrite=False, rows=4, **values):
    with Saving(target, overwrite) as output:
        output.create(dict.fromkeys(values, (rows,)), 2)
        for name, value in values.items():
            output.arrays[name][...] = value
        output.commit({"n_rows": rows})


def test_saving__leaves_what_appeared_meanwhile(tmp_path):
    """In the place of an array before it is created, or after; beside ours, and with the scores of another job."""
    target = tmp_path / "out.zarr"
    with Saving(target, overwrite=False) as output:
        foreign("folder", target / "scores")
        with pytest.raises(OutputExists, match=r"out\.zarr has scores already, which daskrr has not written"):
            output.create({"scores": (4,)}, 2)
        output.create({"estimate": (4,)}, 2)
        output.arrays["estimate"][...] = 1.0
        foreign("folder", target / "estimate")
        output.commit({"n_rows": 4})
    assert (target / "scores" / "mine.txt").read_text() == (target / "estimate" / "mine.txt").read_text() == "mine"
    np.testing.assert_array_equal(open_published(target)["estimate"][...], 1.0)
    assert names(target) == [".daskrr", "estimate", "scores", "zarr.json"]


BESIDE = {"notes.txt": "file", "mine": "folder", "more": "array", "group": "group"}


def test_saving__leaves_what_is_beside_the_scores_alone(tmp_path):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0, estimate=1.0)
    for name, kind in BESIDE.items():
        foreign(kind, target / name)
    (target / ".daskrr" / "generations" / Output(target).commit.current / "mine.txt").write_text("mine")

    def theirs():
        files = {path for name in BESIDE for path in [target / name, *(target / name).rglob("*")] if path.is_file()}
        return {path: path.read_bytes() for path in [*files, *target.rglob("mine.txt")]}

    before = theirs()
    assert len(before) > 5
    save(target, overwrite=True, scores=2.0)
    save(target, overwrite=True, scores=3.0)
    assert theirs() == before, "also in the folder of a generation that is no longer kept"
    assert names(target) == sorted([".daskrr", "scores", "zarr.json", *BESIDE])
    assert verify(target) == []


@pytest.mark.parametrize("name", ["scores", "notes.txt"])
@pytest.mark.parametrize("kind", ["file", "folder", "array", "link"])
def test_saving__refuses_names_that_others_have_taken(kind, name, tmp_path):
    target = tmp_path / "out.zarr"
    save(target, estimate=1.0)
    foreign(kind, target / name)
    before = sorted(target.glob("[!.]*"))
    with pytest.raises(OutputExists, match=rf"has {name} already, which daskrr has not written.*Move it away"):
        save(target, overwrite=True, estimate=2.0, **{name: 2.0})
    assert sorted(target.glob("[!.]*")) == before
    np.testing.assert_array_equal(open_published(target)["estimate"][...], 1.0)
    assert verify(target) == []


def test_saving__replaces_ours_only_when_asked(tmp_path):
    stored(tmp_path)
    other = score(rows(30), Linear(), 0.1, 5, block_rows=10)
    with pytest.raises(OutputExists, match=r"holds scores already.*overwrite=True"):
        other.result.store(tmp_path / "out.zarr", progress=False)
    assert open_published(tmp_path / "out.zarr")["scores"].shape == (47,)
    other.result.store(tmp_path / "out.zarr", overwrite=True, progress=False)
    np.testing.assert_array_equal(open_published(tmp_path / "out.zarr")["scores"][...], other.scores)
    assert names(tmp_path) == ["out.zarr"]


def test_saving__needs_the_folder(tmp_path):
    with pytest.raises(InvalidParameter, match=r"there is no folder .*nowhere"):
        Saving(tmp_path / "nowhere" / "out.zarr", overwrite=False)


@pytest.mark.parametrize("kind", ["new", "replaced"])
def test_saving__leaves_nothing_behind_an_error(kind, tmp_path):
    target = tmp_path / "out.zarr"
    if kind == "replaced":
        save(target, scores=1.0)
    before = sorted(path for path in tmp_path.rglob("*") if "+versions" not in str(path))

    def fail():
        with Saving(target, overwrite=True) as output:
            output.create({"scores": (4,)}, 2)
            output.arrays["scores"][...] = 2.0
            assert kind_of(target) == ("scores" if kind == "replaced" else None)
            assert (target / "zarr.json").exists() == (kind == "replaced")
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    assert sorted(path for path in tmp_path.rglob("*") if "+versions" not in str(path)) == before
    if kind == "replaced":
        np.testing.assert_array_equal(open_published(target)["scores"][...], 1.0)


def test_saving__is_refused_while_another_writes(tmp_path):
    with Saving(tmp_path / "out.zarr", overwrite=False) as output:
        output.create({"scores": (4,)}, 2)
        second = Saving(tmp_path / "out.zarr", overwrite=False)
        with pytest.raises(LeaseHeld, match=r"out\.zarr"):
            second.__enter__()
        output.arrays["scores"][...] = 1.0
        output.commit({"n_rows": 4})
    with pytest.raises(OutputExists, match="holds scores already"):
        second.__enter__()


def test_saving__keeps_one_generation_from_before(tmp_path):
    target = tmp_path / "out.zarr"
    kept = []
    for value in (1.0, 2.0, 3.0):
        save(target, overwrite=True, scores=value)
        kept.insert(0, Output(target).commit.current)
        assert Output(target).commit.published == kept[:2]
        assert [name for name in names(target / ".daskrr" / "generations") if name != "published"] == sorted(kept[:2])
        for generation, expected in zip(kept[:2], (value, value - 1), strict=False):
            np.testing.assert_array_equal(Output(target).open("scores", generation)[0]["scores"][...], expected)
        np.testing.assert_array_equal(zarr.open_array(target / "scores", mode="r")[...], value)
    with pytest.raises(InvalidData, match=r"is no longer kept\. Open what is published now"):
        Output(target).open("scores", kept[2])


@pytest.mark.parametrize("name", ["commit", "commit-copy", "GEN/manifest", "GEN/manifest-copy", "view"])
def test_output__is_read_and_repaired_with_one_of_two_copies(name, tmp_path):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    commit, records = Output(target).commit, Output(target).records
    records.delete(name.replace("GEN", commit.current))
    np.testing.assert_array_equal(open_published(target)["scores"][...], 1.0)
    assert [one for one in verify(target) if "is gone or damaged" in one]
    assert repair(target) != []
    assert verify(target) == []
    assert Output(target).commit.published == commit.published


# --- Writers that have lost their lease ---------------------------------------------------------------


@contextlib.contextmanager
def taken_over(first, monkeypatch):
    """Hold an output that another, who does not know, held before."""
    monkeypatch.setattr(lease, "ABANDONED", {first.lease._token})
    with hold(first.target) as second:
        assert second.lease.generation > first.lease.generation
        yield second


def begun(held, value):
    """A generation that is ready to be published."""
    generation = held.begin({})
    staged = held.staged(generation, {"scores": (4,)}, 2)
    staged.arrays["scores"][...] = value
    return generation, staged


def publish(held, generation, staged):
    held.publish(generation, "scores", staged, {"summary": {"n_rows": 4}, "digests": {}})


def everything(target):
    """All files and links below an output, but for the lease, whose heart beats."""
    found = [path for path in target.rglob("*") if path.is_symlink() or path.is_file()]
    found = [path for path in found if "lease.record" not in str(path)]
    return {path: path.readlink() if path.is_symlink() else path.read_bytes() for path in found}


CHANGES = {
    "publish": lambda held, generation, staged: publish(held, generation, staged),
    "sweep": lambda held, generation, staged: held.sweep(),
    "forget": lambda held, generation, staged: held.forget(generation),
    "rollback": lambda held, generation, staged: held.rollback(),
    "begin": lambda held, generation, staged: held.begin({}),
    "show": lambda held, generation, staged: held.show(),
    "restore": lambda held, generation, staged: held.restore(),
    "adopt": lambda held, generation, staged: held.adopt(),
    "fence": lambda held, generation, staged: held.fence(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_held_output__that_was_taken_over_changes_nothing(change, tmp_path, monkeypatch):
    target = tmp_path / "out.zarr"
    for value in (1.0, 2.0):
        save(target, overwrite=True, scores=value)
    with hold(target) as first:
        mine = begun(first, 9.0)
        with taken_over(first, monkeypatch) as second:
            theirs = begun(second, 3.0)
            before = everything(target)
            for _ in range(2):
                with pytest.raises(LeaseLost, match=r"no longer owns .*: generation \d+ took over"):
                    CHANGES[change](first, *mine)
            assert everything(target) == before
            publish(second, *theirs)
            second.lease.confirm()
    np.testing.assert_array_equal(open_published(target)["scores"][...], 3.0)
    assert verify(target) == []


@pytest.mark.parametrize("change", ["publish", "rollback", "adopt"])
@pytest.mark.parametrize("second_does", ["nothing", "publish"])
def test_held_output__that_is_stopped_after_it_has_asked_cannot_swap_the_commit(
    change, second_does, tmp_path, monkeypatch
):
    """Between its question and the swap, another took over, who need not even have published anything."""
    target = tmp_path / "out.zarr"
    for value in (1.0, 2.0):
        save(target, overwrite=True, scores=value)
    with hold(target) as first:
        mine, replace = begun(first, 9.0), first.records.replace
        found = []

        def late(*given):
            with taken_over(first, monkeypatch) as second:
                if second_does == "publish":
                    publish(second, *begun(second, 3.0))
                found.append(second.commit)
            return replace(*given)

        monkeypatch.setattr(first.records, "replace", late)
        with pytest.raises(LeaseLost, match="another job has changed the commit"):
            CHANGES[change](first, *mine)
    assert Output(target).commit == found[0]
    np.testing.assert_array_equal(open_published(target)["scores"][...], 3.0 if second_does == "publish" else 2.0)
    np.testing.assert_array_equal(
        zarr.open_array(target / "scores", mode="r")[...], open_published(target)["scores"][...]
    )


@pytest.mark.parametrize("name", ["commit", "commit-copy", "view"])
def test_held_output__that_is_stopped_while_it_publishes_leaves_the_records_of_the_next(name, tmp_path, monkeypatch):
    """Just after it has asked for its lease for the last time, whichever record it is about to write."""
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as first:
        generation = first.begin({})
        staged = first.staged(generation, {"scores": (4,), "estimate": (4,)}, 2)
        for array in staged.arrays.values():
            array[...] = 9.0
        medium, found = first.records._medium, []

        def late(write, key, *given):
            if key == name and not found:
                with taken_over(first, monkeypatch) as second:
                    publish(second, *begun(second, 3.0))
                found.append(everything(target))
            return write(key, *given)

        for method in ("put", "put_new", "put_over"):
            monkeypatch.setattr(medium, method, partial(late, getattr(medium, method)))
        with pytest.raises(LeaseLost, match=r"took over|another job has changed the commit"):
            publish(first, generation, staged)
    assert everything(target) == found[0]
    assert verify(target) == []


def test_hold__that_is_stopped_while_it_takes_over_leaves_the_commit_of_the_next(tmp_path, monkeypatch):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as first:
        confirm, found = first.lease.confirm, []

        def late():
            confirm()
            if not found:
                found.append(None)
                with taken_over(first, monkeypatch) as second:
                    publish(second, *begun(second, 3.0))
                found[0] = second.commit

        monkeypatch.setattr(first.lease, "confirm", late)
        with pytest.raises(LeaseLost, match=r"generation \d+ took over"):
            HeldOutput(first.target, first.lease).fence()
    assert Output(target).commit == found[0]


def test_hold__follows_what_the_one_before_published_at_the_last_moment(tmp_path, monkeypatch):
    """It had asked for its lease when it still was its own, and the next one has it already, but has not fenced it."""
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as first:
        mine, look, done = begun(first, 9.0), HeldOutput._look, []

        def late(held):
            look(held)
            if not done:
                done.append(None)
                monkeypatch.setattr(first.lease, "confirm", lambda: None)
                publish(first, *mine)

        monkeypatch.setattr(HeldOutput, "_look", late)
        with taken_over(first, monkeypatch) as second:
            assert (second.commit.current, second.commit.fence) == (mine[0], second.lease.generation)
            with pytest.raises(LeaseLost, match="another job has changed the commit"):
                publish(first, *mine)
            publish(second, *begun(second, 3.0))
    np.testing.assert_array_equal(open_published(target)["scores"][...], 3.0)
    assert verify(target) == []


def test_show__by_who_was_stopped_before_the_link_is_exchanged_is_put_back(tmp_path, monkeypatch):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as first:
        point, found = first.medium.point, []

        def late(name, place):
            if not found:
                with taken_over(first, monkeypatch) as second:
                    publish(second, *begun(second, 3.0))
                found.append(everything(target))
            point(name, place)

        mine = begun(first, 9.0)
        monkeypatch.setattr(first.medium, "point", late)
        with pytest.raises(LeaseLost, match="took over"):
            publish(first, *mine)
    assert everything(target) == found[0]
    np.testing.assert_array_equal(zarr.open_array(target / "scores", mode="r")[...], 3.0)


def test_hold__cleans_temporary_links_of_killed_writers(tmp_path):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    folder = target / ".daskrr" / "generations"
    left = folder / "published+0123456789abcdef"
    left.symlink_to(Output(target).commit.current)
    (folder / "mine").symlink_to(tmp_path)
    with hold(target):
        assert not left.is_symlink()
    assert (folder / "mine").readlink() == tmp_path
    np.testing.assert_array_equal(open_published(target)["scores"][...], 1.0)


@pytest.mark.parametrize("moment", range(4))
def test_fence__never_undoes_what_an_earlier_holder_publishes_at_the_last_moment(moment, tmp_path, monkeypatch):
    """The earlier holder had asked for its lease just before it was taken over, and publishes while that goes on."""
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as first:
        mine, look, seen, lost = begun(first, 9.0), Records.peek, [], []

        def late(self, name):
            if name == COMMIT and len(seen) == moment:
                seen.append("now")
                with monkeypatch.context() as patch, contextlib.suppress(LeaseLost):
                    patch.setattr(first.lease, "confirm", lambda: None)
                    lost.append(mine[0])
                    publish(first, *mine)
                    lost.clear()
            elif name == COMMIT:
                seen.append("before")
            return look(self, name)

        monkeypatch.setattr(Records, "peek", late)
        with contextlib.suppress(LeaseLost), taken_over(first, monkeypatch):
            pass
        monkeypatch.undo()
        assert "now" in seen
    assert lost or mine[0] in Output(target).commit.published


def test_hold__clears_links_that_a_killed_writer_has_left(tmp_path):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    ours = [target / f"{name}+0123456789abcdef" for name in ("scores", "zarr.json", ".daskrr/generations/published")]
    theirs = [target / "mine+0123456789abcdef", target / "my.txt+0123456789abcdef"]
    for path in ours:
        path.symlink_to(path.with_name(path.name.partition("+")[0]).readlink())
    theirs[0].symlink_to("scores")
    theirs[1].write_text("mine")
    with hold(target):
        assert not any(path.is_symlink() for path in ours)
    assert all(path.exists() for path in theirs)


def test_sweep__of_who_is_taken_over_while_it_looks_leaves_what_the_other_began(tmp_path, monkeypatch):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as first, contextlib.ExitStack() as stack:
        names, theirs = first.records.names, []

        def late(*given):
            second = stack.enter_context(taken_over(first, monkeypatch))
            theirs.append((second, *begun(second, 3.0)))
            return names(*given)

        monkeypatch.setattr(first.records, "names", late)
        with pytest.raises(LeaseLost, match="took over"):
            first.sweep()
        publish(*theirs[0])
        np.testing.assert_array_equal(open_published(target)["scores"][...], 3.0)


def test_hold__leaves_what_another_began_that_took_over_meanwhile(tmp_path, monkeypatch):
    """Its last act is to clear what is of no use, and it finds out before that it has nothing to say any more."""
    target = tmp_path / "out.zarr"
    with contextlib.ExitStack() as stack:
        with hold(target) as first:
            manifests = first.manifests

            def late():
                second = stack.enter_context(taken_over(first, monkeypatch))
                publish(second, *begun(second, 3.0))
                return []

            monkeypatch.setattr(first, "manifests", late)
        assert manifests() == Output(target).commit.published
        np.testing.assert_array_equal(open_published(target)["scores"][...], 3.0)


def test_hold__by_a_clock_that_has_gone_on_publishes_nothing(tmp_path):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    with hold(target) as held:
        mine = begun(held, 9.0)
        held.lease._clock = lambda: machine.clock() + 61
        with pytest.raises(LeaseLost, match="no heartbeat could be written for 60 s"):
            publish(held, *mine)
    np.testing.assert_array_equal(open_published(target)["scores"][...], 1.0)


# --- Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "size"), [(0, 10), (10, 3), (0, 13), (5, 5)])
def test_staged_write__writes_whole_chunks(start, size, tmp_path):
    with Saving(tmp_path / "out.zarr", overwrite=False) as output:
        output.create({"scores": (13,)}, 5)
        output.staged.write({"scores": np.arange(size, dtype=float)}, start)
        output.staged.settle([start])
        found = output.arrays["scores"][...]
    np.testing.assert_array_equal(found[start : start + size], np.arange(size))
    assert np.isnan(np.delete(found, slice(start, start + size))).all()


def test_staged_write__stores_the_bytes_that_zarr_would(tmp_path):
    values = np.random.default_rng(0).random((13, 2))
    with Saving(tmp_path / "out.zarr", overwrite=False) as output:
        output.create({"scores": (13, 2), "rows": (13,)}, 5, rows="int64")
        output.staged.write({"scores": values, "rows": np.arange(13)}, 0)
        output.staged.settle([0, 5, 10])
        for name, expected in (("scores", values), ("rows", np.arange(13))):
            array = output.arrays[name]
            keys = [chunk_key(array, start) for start in (0, 5, 10)]
            ours = [output.staged.medium.read(key) for key in keys]
            array[...] = expected
            assert [output.staged.medium.read(key) for key in keys] == ours


@pytest.mark.parametrize(("start", "size"), [(1, 4), (0, 4), (0, 12), (5, 7), (3, 10)])
def test_staged_write__refuses_parts_of_chunks(start, size, tmp_path):
    with Saving(tmp_path / "out.zarr", overwrite=False) as output:
        output.create({"scores": (13,)}, 5)
        with pytest.raises(RuntimeError, match=f"rows {start}–{start + size} are not whole chunks of 5"):
            output.staged.write({"scores": np.zeros(size)}, start)


# --- Opening ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "folder", "array", "group", "broken"])
def test_open__refuses_what_is_no_result(kind, tmp_path):
    if kind:
        foreign(kind, tmp_path / "out.zarr")
    with pytest.raises(InvalidData, match="there are no scores at"):
        open_published(tmp_path / "out.zarr")
    assert kind_of(tmp_path / "out.zarr") is None


def forge(path, **changes):
    """Change what the manifest says, in both copies."""
    output = Output(path)
    generation = output.commit.current
    for name in ("manifest", "manifest-copy"):
        output.records.write(f"{generation}/{name}", output.manifest(generation) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "format 99; this version reads format 2"),
        ({"kind": "a sample"}, "holds a sample, not scores"),
        ({"generation": "000001-00000000"}, "is none that daskrr writes"),
        ({"metadata": {"../x/zarr.json": "{}"}}, "is none that daskrr writes"),
        ({"groups": {"sketch": "../.."}}, "is none that daskrr writes"),
        ({"metadata": {"zarr.json": "{"}}, "zarr.json of"),
    ],
)
def test_open__refuses_a_manifest_that_we_never_write(changes, message, tmp_path):
    save(tmp_path / "out.zarr", scores=1.0)
    forge(tmp_path / "out.zarr", **changes)
    with pytest.raises(InvalidData, match=message):
        open_published(tmp_path / "out.zarr")


def test_open__believes_the_manifest_and_not_what_is_beside_the_chunks(tmp_path):
    target = tmp_path / "out.zarr"
    save(target, scores=1.0)
    folder = target / folder_of(Output(target).commit.current)
    for path in (folder / "zarr.json", folder / "scores" / "zarr.json"):
        path.write_text("{")
    np.testing.assert_array_equal(open_published(target)["scores"][...], 1.0)
    assert len(verify(target)) == 2


def test_check_target__does_not_take_a_job_that_begins_meanwhile_for_something_foreign(tmp_path, monkeypatch):
    output = Output(tmp_path / "out.zarr")
    look = Files.below

    def look_and_begin(medium, prefix):
        found = look(medium, prefix)
        (tmp_path / "out.zarr" / ".daskrr").mkdir(parents=True, exist_ok=True)
        return found

    monkeypatch.setattr(Files, "below", look_and_begin)
    check_target(output, overwrite=False, kind="scores")
