"""Speed of large matrix multiplies in several processes at once, each of which imports little more than NumPy."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIZE = 1536


def matmul_rates(dtype: str, seconds: float, n_processes: int) -> dict[str, float]:
    """Flops per second of single-threaded matrix multiplies in ``n_processes`` processes at once, added up.

    ``"wall"`` is per second that passes, ``"processor"`` per second that a process really runs: they differ where
    other programs compete for the cores.
    """
    command = [sys.executable, "-m", "benchmarks.matmul", dtype, str(seconds)]
    settings = {"cwd": Path(__file__).parents[1], "env": os.environ | {"OPENBLAS_NUM_THREADS": "1"}}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **settings)
        for _ in range(n_processes)
    ]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate()[0]) for process in processes]
    return {clock: sum(answer[clock] for answer in answers) for clock in ("wall", "processor")}


def multiply(dtype: str, seconds: float) -> dict[str, float]:
    """Multiply matrices for a while, once told to begin; return flops per second of both clocks."""
    A = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(dtype)
    out = A @ A
    print("ready", flush=True)
    sys.stdin.readline()
    flops, wall, processor = 0.0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        np.matmul(A, A, out=out)
        flops += 2.0 * SIZE**3
    return {"wall": flops / (time.perf_counter() - wall), "processor": flops / (time.process_time() - processor)}


if __name__ == "__main__":
    print(json.dumps(multiply(sys.argv[1], float(sys.argv[2]))))
