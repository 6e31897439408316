"""Speed of large matrix multiplies in several processes at once, each of which imports little more than NumPy."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIZE = 1536


def matmul_rate(dtype: str, seconds: float, n_processes: int) -> float:
    """Flops per second of single-threaded matrix multiplies in ``n_processes`` processes at once, added up."""
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
    return sum(float(process.communicate()[0]) for process in processes)


def multiply(dtype: str, seconds: float) -> float:
    """Multiply matrices for a while, once told to begin; return flops per second."""
    A = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(dtype)
    out = A @ A
    print("ready", flush=True)
    sys.stdin.readline()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        np.matmul(A, A, out=out)
        count += 1
    return count * 2.0 * SIZE**3 / (time.perf_counter() - began)


if __name__ == "__main__":
    print(multiply(sys.argv[1], float(sys.argv[2])))
