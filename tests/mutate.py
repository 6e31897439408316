"""Plants defects one at a time in a copy of the package, and tells which the quick tests notice; run it by hand.

    python tests/mutate.py            all of them, each with the tests that should notice it
    python tests/mutate.py lease      those with this word in their names
    python tests/mutate.py --whole    each with all quick tests, which takes hours

A defect whose text is not found any more fails: whoever changes the code changes its defect.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Defect:
    """What is wrong: in a file, one text in place of another; and the tests that should notice."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


DEFECTS = (
    Defect(
        "residual round-off budget 0",
        "numerics/bounds.py",
        "    budget = certainty.residual_error * diagonal\n    diagonal =",
        "    budget = 0.0 * diagonal\n    diagonal =",
        ("numerics/test_bounds.py", "nystrom/test_certificate.py"),
    ),
    Defect(
        "score round-off dropped from the upper end",
        "numerics/bounds.py",
        "    high = np.minimum(facts.scores * (1.0 + error), 1.0)",
        "    high = np.minimum(facts.scores, 1.0)",
        ("numerics/test_bounds.py", "nystrom/test_certificate.py", "numerics/test_repeats.py"),
    ),
    Defect(
        "rounding of the ends' own formulas forgotten",
        "numerics/bounds.py",
        "* (1.0 - ROUNDING), upper * (1.0 + ROUNDING)",
        ", upper",
        ("numerics/test_bounds.py",),
    ),
    Defect(
        "chains of every device as long as the processor's",
        "numerics/pass1.py",
        "chain_rows(rank, current().chain_rows)",
        "chain_rows(rank, 8192)",
        ("numerics/test_pass1.py",),
    ),
    Defect(
        "a panel's last vectors end with its first",
        "kernels/product_loops.py",
        "INTEGER((vector + 1) * builder.lanes)), stop)",
        "INTEGER(builder.lanes)), stop)",
        ("kernels/test_products.py",),
    ),
    Defect(
        "panels of a factor that end with a full one",
        "kernels/products.py",
        "stop in range(p, 0, -width)",
        "stop in range(-(-p // width) * width, 0, -width)",
        ("kernels/test_products.py",),
    ),
    Defect(
        "norms of a product that begin with those of other rows",
        "kernels/product_loops.py",
        "with turns(builder, count, by=INTEGER(ROWS)) as group:",
        "with turns(builder, INTEGER(0), by=INTEGER(ROWS)) as group:",
        ("kernels/test_products.py",),
    ),
    Defect(
        "rows that are multiplied by the first panel first",
        "kernels/product_loops.py",
        "stop = builder.sub(n_columns, panel.index)",
        "stop = _least(builder, builder.add(panel.index, width), n_columns)",
        ("kernels/test_products.py",),
    ),
    Defect(
        "panels of a Gram matrix that overlap",
        "kernels/product_loops.py",
        "lines = builder.sub(builder.mul(number, n_lines), missing)",
        "lines = builder.sub(builder.mul(number, n_lines), panel)",
        ("kernels/test_products.py",),
    ),
    Defect(
        "panels of columns packed as rows",
        "kernels/products.py",
        "padded.reshape(p, -1, width).transpose(1, 0, 2)",
        "padded.reshape(-1, p, width)",
        ("kernels/test_products.py",),
    ),
    Defect(
        "limits of the first panel for all panels of a tile",
        "kernels/radial.py",
        "self._differences.finish(X[rows], limits[rows], out[rows])",
        "self._differences.finish(X[rows], limits[: len(X[rows])], out[rows])",
        ("kernels/test_kernels.py",),
    ),
    Defect(
        "a formula that products forget where they are those of BLAS",
        "kernels/products.py",
        "    if formula is not None:\n        compiled.sweep",
        "    if formula is not None and A.size < 0:\n        compiled.sweep",
        ("kernels/test_products.py",),
    ),
    Defect(
        "a weight that features share left out",
        "kernels/loops.py",
        "        if self.share:\n",
        "        if not totals:\n",
        ("kernels/test_compiled.py",),
    ),
    Defect(
        "sign of the spread",
        "numerics/bounds.py",
        "    excess = (most + spread) ** 2 / shifts",
        "    excess = (most - spread) ** 2 / shifts",
        ("numerics/test_bounds.py", "nystrom/test_certificate.py"),
    ),
    Defect(
        "audit with twice the rows it has",
        "nystrom/audit.py",
        "deviation_bound(eigenvalue, self.weight, self.rows, failure_probability)",
        "deviation_bound(eigenvalue, self.weight, 2 * self.rows, failure_probability)",
        ("nystrom/test_audit.py",),
    ),
    Defect(
        "looks of updates not counted",
        "jobs/update.py",
        "        ledger = self.ledger.after_audit() if self.ledger.chooses else self.ledger",
        "        ledger = self.ledger",
        ("jobs/test_update.py", "nystrom/test_ledger.py"),
    ),
    Defect(
        "sum of scores not compared",
        "leverage/writing.py",
        "        if not abs(total - dimension) <= (error + SUM_ERROR) * dimension:",
        "        if False:",
        ("storage/test_storage.py", "numerics/test_pass1.py"),
    ),
    Defect(
        "node of the tree whole one early",
        "runtime/tree.py",
        "if _count(children) == FAN_IN:",
        "if _count(children) == FAN_IN - 1:",
        ("runtime/test_tree.py", "jobs/test_update.py", "jobs/test_jobs.py"),
    ),
    Defect(
        "checksums not compared between the passes",
        "numerics/pass2.py",
        "        if before != now:",
        "        if False:",
        (
            "leverage/test_leverage.py",
            "runtime/test_rows.py",
            "jobs/test_scoring.py",
            "jobs/test_jobs.py",
            "faults/test_inputs.py",
        ),
    ),
    Defect(
        "input fingerprint not compared at publish",
        "jobs/job.py",
        '        if fingerprint(result.rows) != self.wanted["input"]["fingerprint"]:',
        "        if False:",
        ("jobs/test_jobs.py",),
    ),
    Defect(
        "a staged block believed",
        "jobs/writer.py",
        '    return record is not None and [receipt["digests"] for receipt in record["blocks"]] == stored',
        "    return record is not None",
        ("jobs/test_jobs.py",),
    ),
    Defect(
        "commit before data",
        "storage/writing.py",
        "        groups = [self._placed(generation, group) for group in groups]\n",
        "        groups = [self._placed(generation, group) for group in groups]\n"
        "        self._swap(replace(self._commit, published=[generation, *self._commit.published]))\n",
        ("jobs/test_jobs.py", "storage/test_storage.py", "faults/test_state_machine.py"),
    ),
    Defect(
        "publishing without asking the lease",
        "storage/lease.py",
        "        self.check()\n        found = self._find()\n        if found is not None and found[0] is not UNKNOWN",
        "        return\n        found = self._find()\n        if found is not None and found[0] is not UNKNOWN",
        ("storage/test_lease.py", "storage/test_storage.py"),
    ),
    Defect(
        "fsync of records left out",
        "storage/local.py",
        "            file.flush()\n            machine.sync_file(file.fileno())",
        "            file.flush()",
        ("faults/test_power_loss.py", "storage/test_records.py"),
    ),
    Defect(
        "fsync of chunks left out",
        "storage/zarr_arrays.py",
        "        self.medium.settle(chunk_key(array, start) for start in starts for array in self.arrays.values())",
        "        return",
        ("faults/test_power_loss.py",),
    ),
    Defect(
        "chunks not waited for",
        "storage/zarr_arrays.py",
        "        begun = [one for start in starts for one in self._begun.get(start, ())]",
        "        begun: list[Any] = []",
        ("storage/test_retry.py",),
    ),
    Defect(
        "folders not synchronized before the commit",
        "storage/writing.py",
        '        insist(partial(self.medium.settle_tree, folder), f"synchronize {self}")\n',
        "",
        ("faults/test_power_loss.py",),
    ),
    Defect(
        "reader pinned to nothing",
        "storage/snapshot.py",
        'self._store.get(f"{self._folder}/{self._groups.get(first, first)}/{rest}", prototype, byte_range)',
        "self._store.get(key, prototype, byte_range)",
        ("jobs/test_jobs.py", "storage/test_storage.py", "faults/test_readers.py"),
    ),
    Defect(
        "metadata beside the chunks believed",
        "storage/snapshot.py",
        "            text = self._metadata.get(key)\n"
        "            return None if text is None else prototype.buffer.from_bytes(text.encode())",
        '            return await self._store.get(f"{self._folder}/{key}", prototype, byte_range)',
        ("faults/test_secrets.py", "faults/test_hostile.py", "storage/test_storage.py"),
    ),
    Defect(
        "checksum of a record not compared",
        "storage/record_format.py",
        "    if CHECKSUM.unpack(",
        "    if False and CHECKSUM.unpack(",
        ("storage/test_records.py",),
    ),
    Defect(
        "name of a record not compared",
        "storage/record_format.py",
        "    if told != name:",
        "    if False:",
        ("storage/test_records.py",),
    ),
    Defect(
        "compare-and-swap without predecessor",
        "storage/local.py",
        "        if number > 1 and not follows(numbered(path, number - 1), predecessor):",
        "        if False:",
        ("storage/test_records.py",),
    ),
    Defect(
        "owner not compared in the heartbeat",
        "storage/lease.py",
        "            elif current[0].token == self._token:\n                renewed",
        "            elif True:\n                renewed",
        ("storage/test_lease.py",),
    ),
    Defect(
        "taking over too early",
        "storage/lease.py",
        "self._clock() - self._watched[1] > max(self.seconds, holder.seconds)",
        "self._clock() - self._watched[1] > min(self.seconds, holder.seconds) / 2",
        ("storage/test_lease.py",),
    ),
    Defect(
        "clock that may go back",
        "storage/lease.py",
        "        if not self._lost and not 0 <= self._clock() - self._renewed < self.seconds:",
        "        if not self._lost and not self._clock() - self._renewed < self.seconds:",
        ("storage/test_lease.py",),
    ),
    Defect(
        "commit not fenced by who takes the lease",
        "storage/writing.py",
        "        return self._swapped(replace(self.commit or Commit(fence=0), fence=self.lease.generation))\n",
        "        self._commit = self.commit or Commit(fence=0)\n        return True\n",
        ("storage/test_storage.py", "jobs/test_jobs.py"),
    ),
    Defect(
        "who takes the lease gives up if the one before has just published",
        "storage/writing.py",
        "        while not self._is_fenced():\n            time.sleep(SECONDS_TO_LOOK_AGAIN)\n",
        "        self._is_fenced()\n",
        ("storage/test_storage.py",),
    ),
    Defect(
        "kept pieces of one array taken for those of another",
        "storage/zarr_input.py",
        "self.kept.read((str(self.array.store_path), start, stop)",
        'self.kept.read(("", start, stop)',
        ("runtime/test_rows.py",),
    ),
    Defect(
        "a part of a piece kept as a whole",
        "storage/zarr_input.py",
        "        if self.kept is None or not is_whole:",
        "        if self.kept is None:",
        ("runtime/test_rows.py",),
    ),
    Defect(
        "no ridge where a device finds the factor",
        "numerics/panels.py",
        "        shifted.reshape(-1)[:: len(A) + 1] += shift\n",
        "",
        ("numerics/test_panels.py",),
    ),
    Defect(
        "the next piece of another place read ahead",
        "storage/pieces.py",
        "            self._coming[stop, then] = _READERS.submit(read, stop, then)",
        "            self._coming[stop, then] = _READERS.submit(read, start, start + then - stop)",
        ("runtime/test_rows.py",),
    ),
    Defect(
        "copy of the commit not read",
        "storage/output.py",
        "map(self._read_commit, (COMMIT, COPY))",
        "map(self._read_commit, (COMMIT,))",
        ("storage/test_storage.py", "faults/test_healing.py", "faults/test_state_machine.py"),
    ),
    Defect(
        "a user's array replaced",
        "storage/view.py",
        "        return sorted(name for name in names if name in there and not self._is_ours(name, known))",
        "        return []",
        ("storage/test_storage.py", "faults/test_fencing.py"),
    ),
    Defect(
        "whatever is in a generation deleted",
        "storage/writing.py",
        "    return [key for key in keys if OF_ZARR.fullmatch(key)]",
        "    return list(keys)",
        ("storage/test_storage.py", "faults/test_fencing.py"),
    ),
    Defect(
        "generations kept from before swept",
        "storage/writing.py",
        "published=[generation, *before[:keep]]",
        "published=[generation]",
        ("faults/test_readers.py", "faults/test_state_machine.py"),
    ),
    Defect(
        "ledger forgotten by a rollback",
        "jobs/update.py",
        "        spent = None if commit is None else commit.ledger\n",
        "        spent = None\n",
        ("jobs/test_update.py",),
    ),
    Defect(
        "damaged sums of the published run believed",
        "jobs/update.py",
        'or self.known["base_records"] != base_records(journal):',
        "or False:",
        ("jobs/test_update.py", "faults/test_healing.py"),
    ),
    Defect(
        "pickling codecs of inputs accepted",
        "storage/trust.py",
        "        if not isinstance(name, str) or name not in policy.codecs:",
        "        if False:",
        ("storage/test_trust.py", "faults/test_hostile.py"),
    ),
)


def main() -> int:
    """Plant all defects that were asked for; how many went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only defects with this in their names")
    parser.add_argument("--whole", action="store_true", help="run all quick tests for each")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time")
    arguments = parser.parse_args()
    chosen = [one for one in DEFECTS if arguments.word in one.name]
    files = sorted({name for one in chosen for name in one.tests})
    with ThreadPoolExecutor(arguments.jobs) as pool:
        # Tests that fail here without any defect say nothing about one.
        failing = sorted({name for found in pool.map(_control, files) for name in found})
        print(f"{len(failing)} tests fail without a defect", *failing, sep="\n  ", flush=True)
        found = list(pool.map(lambda one: noticed(one, failing, arguments.whole), chosen))
    missed = [one.name for one, seen in zip(chosen, found, strict=True) if not seen]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} noticed", *missed, sep="\n  missed: ")
    return len(missed)


def _control(name: str) -> list[str]:
    return _failures(ROOT, [f"tests/{name}"], [])


def noticed(defect: Defect, failing: list[str], whole: bool) -> bool:
    """Whether tests fail on a copy with the defect that do not fail anyway."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
        file = copy / "daskrr" / defect.file
        text = file.read_text(encoding="utf-8")
        if text.count(defect.right) != 1:
            print(f"{defect.name}: its text is {text.count(defect.right)} times in {defect.file}")
            return False
        file.write_text(text.replace(defect.right, defect.wrong), encoding="utf-8")
        tests = ["tests"] if whole else [f"tests/{name}" for name in defect.tests]
        found = _failures(copy, tests, ["-x", *(f"--deselect={name}" for name in failing)])
    print(f"{defect.name}: {'noticed by ' + found[0] if found else 'MISSED'}", flush=True)
    return bool(found)


def _failures(folder: Path, tests: list[str], options: list[str]) -> list[str]:
    """Names of the quick tests of a folder that fail."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-pno:cacheprovider", "-mnot slow", *options, *tests]
    found = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [line[1] for line in lines]


if __name__ == "__main__":
    sys.exit(main())
