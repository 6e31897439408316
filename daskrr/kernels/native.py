"""Machine code of loops for the processor at hand, made in milliseconds when a process first needs it."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from llvmlite import binding, ir

from daskrr.kernels.lanes import INTEGER, SCALARS, WIDE, Builder, Lanes, same
from daskrr.kernels.loops import Loop, Turn, repeated, turns

# Numbers that are computed side by side: several vectors of any processor, so that one need not wait for the other.
# Landmarks of pairs are padded to a multiple of it.
LANES = 16

_COMPILING = threading.Lock()


class InTurn:
    """One row after the other, in strips of lanes, the last of which may be shorter."""

    lanes = LANES

    @property
    def rows_at_once(self) -> int:
        """As many as have room in the registers; no bit depends on it."""
        return 4 if has_wide_registers() else 1

    def rows(self, builder: Builder, stop: ir.Value, by: int = 1) -> AbstractContextManager[Turn]:
        """All."""
        return turns(builder, stop, by=INTEGER(by))

    def strips(self, builder: Builder, stop: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
        """All, and the last with its lanes."""
        rest = builder.srem(stop, INTEGER(LANES))
        whole = builder.sub(stop, rest)
        with turns(builder, whole, by=INTEGER(LANES)) as strip:
            yield strip.index, None
        with builder.if_then(builder.icmp_signed(">", rest, INTEGER(0))):
            yield whole, _mask(builder, rest)

    def add_up(self, builder: Builder, stop: ir.Value, add: Callable[..., Lanes]) -> ir.Value:
        """Lane by lane, and then all lanes."""
        rest = builder.srem(stop, INTEGER(LANES))
        whole = builder.sub(stop, rest)
        with turns(builder, whole, by=INTEGER(LANES), begin=[same(SCALARS[WIDE](0.0), LANES)]) as strip:
            strip.next = [add(strip.totals[0], strip.index).value]
        return add(strip.totals[0], whole, _mask(builder, rest)).total()


def _mask(builder: Builder, count: ir.Value) -> ir.Value:
    """Which lanes are among the first so many."""
    numbers = ir.VectorType(INTEGER, LANES)(list(range(LANES)))
    return builder.icmp_signed("<", numbers, repeated(builder, count))


@cache
def code_of(loop: Loop) -> Callable[..., None]:
    """The loop as a function of ctypes, of addresses and sizes, which releases the interpreter lock."""
    builder = loop.build(InTurn())
    builder.ret_void()
    function = builder.function
    with _COMPILING:
        engine = _engine()
        engine.add_module(binding.parse_assembly(str(function.module)))
        engine.finalize_object()
        address = engine.get_function_address(function.name)
    kinds = [ctypes.c_int64 if kind == INTEGER else ctypes.c_void_p for kind in function.type.pointee.args]
    return ctypes.CFUNCTYPE(None, *kinds)(address)


@cache
def _engine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=_features(), opt=3
    )
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


@cache
def _features() -> str:
    """What the processor has besides what its name says; nothing where LLVM cannot tell."""
    try:
        found = binding.get_host_cpu_features()
    except RuntimeError:
        return ""
    # By default LLVM leaves half the width of these processors unused.
    return found.flatten() + (",-prefer-256-bit" if found.get("avx512f") else "")


def has_wide_registers() -> bool:
    """Whether there are 32 registers of eight numbers each."""
    return "+avx512f" in _features()
