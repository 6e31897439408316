"""Loops as code for GPUs of NVIDIA: their threads share out rows and columns, and a warp adds up a row."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from llvmlite import binding, ir

from daskrr.kernels.lanes import INTEGER, SCALARS, WIDE, Builder, Lanes, same
from daskrr.kernels.loops import Loop, Turn, turns

# The oldest kind that CUDA 13 knows; the driver makes code for its own kind of it.
ARCHITECTURE = "sm_75"
TRIPLE = "nvptx64-nvidia-cuda"

# Threads of a warp, which can hand each other numbers.
WARP = 32
# Threads of a block, by columns and rows: all next to each other, or a warp for each of several rows.
FLAT, BY_ROWS = (256, 1), (WARP, 8)
# As many blocks as a GPU takes in one direction; what is left, threads do in further turns.
MOST_BLOCKS = 65_535

_SHORT = ir.IntType(32)
_COMPILING = threading.Lock()


class Shared:
    """Rows shared out along one direction of the threads, columns along the other, one number at a time."""

    lanes = 1
    rows_at_once = 1

    def rows(self, builder: Builder, stop: ir.Value, by: int = 1) -> AbstractContextManager[Turn]:
        """Every so many rows."""
        first, step = _place(builder, "y")
        return turns(builder, stop, by=builder.mul(step, INTEGER(by)), first=builder.mul(first, INTEGER(by)))

    def strips(self, builder: Builder, stop: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
        """Every so many columns."""
        first, by = _place(builder, "x")
        with turns(builder, stop, by=by, first=first) as strip:
            yield strip.index, None

    def add_up(self, builder: Builder, stop: ir.Value, add: Callable[..., Lanes]) -> ir.Value:
        """Thread by thread, and then those of the warp in a tree, by which all have the same sum."""
        first, by = _place(builder, "x")
        with turns(builder, stop, by=by, first=first, begin=[same(SCALARS[WIDE](0.0), 1)]) as strip:
            strip.next = [add(strip.totals[0], strip.index).value]
        total = builder.extract_element(strip.totals[0], _SHORT(0))
        distance = WARP // 2
        while distance:
            total = builder.fadd(total, _of_another(builder, total, distance))
            distance //= 2
        return total


def _place(builder: Builder, axis: str) -> tuple[ir.Value, ir.Value]:
    """The number of the thread along an axis, and how many there are."""
    thread, threads, block, blocks = (
        builder.zext(_operation(builder, f"read.ptx.sreg.{name}.{axis}", []), INTEGER)
        for name in ("tid", "ntid", "ctaid", "nctaid")
    )
    return builder.add(builder.mul(block, threads), thread), builder.mul(blocks, threads)


def _of_another(builder: Builder, value: ir.Value, distance: int) -> ir.Value:
    """The number that a thread some way off has: its two halves, handed over each."""
    bits = builder.bitcast(value, INTEGER)
    halves = [builder.trunc(builder.lshr(bits, INTEGER(shift)), _SHORT) for shift in (0, 32)]
    low, high = (
        builder.zext(
            _operation(builder, "shfl.sync.bfly.i32", [_SHORT(-1), half, _SHORT(distance), _SHORT(WARP - 1)]), INTEGER
        )
        for half in halves
    )
    return builder.bitcast(builder.or_(low, builder.shl(high, INTEGER(32))), value.type)


def _operation(builder: Builder, name: str, arguments: list[ir.Value]) -> ir.Value:
    full = f"llvm.nvvm.{name}"
    signature = ir.FunctionType(_SHORT, [_SHORT] * len(arguments))
    function = builder.module.globals.get(full) or ir.Function(builder.module, signature, full)
    return builder.call(function, arguments)


@cache
def text_of(loop: Loop) -> tuple[str, str]:
    """The name of the function, and its code as the driver takes it."""
    builder = loop.build(Shared())
    builder.ret_void()
    function, module = builder.function, builder.module
    function.calling_convention = "ptx_kernel"
    with _COMPILING:
        machine = _machine()
        module.triple, module.data_layout = TRIPLE, str(machine.target_data)
        return function.name, machine.emit_assembly(binding.parse_assembly(str(module)))


@cache
def _machine() -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple(TRIPLE).create_target_machine(cpu=ARCHITECTURE, opt=3)


def grid_of(loop: Loop, n_rows: int, n_columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Blocks and the threads of a block, by columns and rows, for so many rows and columns."""
    block = BY_ROWS if loop.by_rows else FLAT
    columns = 1 if loop.by_rows else -(-n_columns // block[0])
    return (_some(columns), _some(-(-n_rows // block[1]))), block


def _some(blocks: int) -> int:
    return max(1, min(blocks, MOST_BLOCKS))
