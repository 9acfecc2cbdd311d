"""Kernels of Triton compiled for GPUs, without one: ``python -m`` this prints a line for each.

What the compiler makes of them is looked at: loads of 16 bytes, no multiplication contracted with an addition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hvdkit.transports.gpu import triton_kernels

CAPABILITIES = (80, 90)  # A100, H100 and H200
FLOATS = ("values", "kept", "left", "rows", "thresholds")
# Addresses that begin on 16 bytes, and numbers that are multiples of 16, as those of real buckets are.
ALIGNED = (*FLOATS, "payloads", "elements")


def variants() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A name, a kernel and the values of its constant arguments."""
    for bits, block in ((8, 256), (8, 48), (4, 256), (4, 48), (1, 1024)):
        width = triton.next_power_of_2(block)
        shape = {"BITS": bits, "BLOCK": block, "WIDTH": width, "GROUP": max(1, triton_kernels.TILE // width)}
        yield f"encode {bits} bits, {block}", triton_kernels._encode, {**shape, "KEEPS": True}
        yield f"decode {bits} bits, {block}", triton_kernels._decode, shape
    nothing_kept = {"kept": None, "left": None, "KEEPS": False}
    yield "encode 8 bits, nothing kept", triton_kernels._encode, {**shape, **nothing_kept}
    for kept in ({"KEEPS": True}, nothing_kept):
        yield "estimate", triton_kernels._estimate, {**kept, "SAMPLE": triton_kernels.SAMPLE}
        yield "survey", triton_kernels._survey, {**kept, "TILE": triton_kernels.TILE}
        yield "place", triton_kernels._place, {**kept, "CHUNK": triton_kernels.CHUNK}
        yield "take", triton_kernels._take, {**kept, "TILE": triton_kernels.TILE}


def compiled(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    if constants.get("KEEPS") is False and "broken" in names:
        constants["broken"] = None
    pointers = ("payloads", "counts", "broken", "chosen", "starts")
    kinds = {name: "*fp32" if name in FLOATS else "*i32" if name in pointers else "i32" for name in names}
    source = ASTSource(
        fn=kernel,
        signature=kinds | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in {*names} & {*ALIGNED} - {*constants}},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})


def main() -> None:
    for name, kernel, constants in variants():
        for capability in CAPABILITIES:
            made = compiled(kernel, constants, capability)
            text = made.asm["ptx"]
            assert made.asm["cubin"], name
            assert not re.search(r"fma\.rn\.f32", text), f"{name}: a product is added without being rounded"
            wide = len(re.findall(r"global[^\n]*v4\.b32", text))
            print(f"{name}, sm_{capability}: {wide} wide accesses, {made.metadata.shared} bytes of shared memory")
            assert wide or name.startswith(("estimate", "place")), f"{name}: no access is wide"


if __name__ == "__main__":
    main()
