"""`python -m kernels.triton.compile_check`: does every kernel compile for a device that is not here?

Each kernel is compiled with the tiles of the device's table, for shapes of real models, down to machine code:
type errors, too much shared memory and register spills show without a GPU. So does whether kernels that must
give the same bits multiply with the same instructions. Needs triton and its ptxas, and must not run in the
interpreter. Exit status 1 if a kernel does not compile, asks for more than the device has, or multiplies
otherwise than its family.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.ops import PARTITION_SIZE
from kernels.triton.availability import MIN_CAPABILITY, interpreting
from kernels.triton.tiles import Mode, tiles_for

# That one program may use, by capability.
SHARED_BYTES = {
    **dict.fromkeys((80, 87), 163 * 1024),
    **dict.fromkeys((86, 89, 120, 121), 99 * 1024),
    **dict.fromkeys((90, 100, 103, 110), 227 * 1024),
}
_POINTERS = {  # by parameter; "T" is the model's type
    **dict.fromkeys(("x", "y", "q", "k", "v", "out", "q_out", "weight", "bias", "residual", "total"), "T"),
    **dict.fromkeys(("gate_up", "pool", "keys_values", "staging"), "T"),
    **dict.fromkeys(("cos", "sin", "parts", "partial_max", "partial_sum", "partial_out", "scores"), "fp32"),
    **dict.fromkeys(("peaks", "inverses", "least", "repetitions", "frequencies", "presences"), "fp32"),
    **dict.fromkeys(("query_starts", "context_lens", "tables", "block_ids"), "i32"),
    **dict.fromkeys(("positions", "slots", "rows", "counts", "sums", "prefixes", "above", "ties"), "i64"),
    **dict.fromkeys(("first_prefixes", "first_above", "first_ties", "part_sums", "seeds", "tokens"), "i64"),
    "shares": "fp64",
}
_FLOATS = {"eps", "scale"}
_UNKNOWN = {"num_rows", "num_seqs", "num_tiles", "num_splits", "row_tiles", "num_parts", "num_entries"}
_UNKNOWN |= {"num_blocks", "most_partials", "stride_table", "level", "first_layer", "first_head"}
_UNKNOWN |= {"num_layers"}  # all of these change from call to call: no kernel is specialised on them


@dataclass(frozen=True, slots=True)
class Case:
    label: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    dtype: str = "bf16"
    types: tuple[tuple[str, str], ...] = ()  # where a parameter is not what `_POINTERS` says
    family: str = ""  # kernels of one family must multiply with the same instructions


@dataclass(frozen=True, slots=True)
class Compiled:
    label: str
    error: str | None = None
    registers: int = 0
    stack_bytes: int = 0  # spilled registers, or arrays
    shared_bytes: int = 0
    instructions: str = "-"  # of tensor cores, and their shapes


_ATTENTION_SHAPES = ((3, 64, "bf16"), (4, 128, "bf16"), (8, 256, "bf16"), (4, 128, "fp32"))


def cases(capability: int, *, quick: bool) -> Iterator[Case]:
    """Every kernel at the shapes of Llama-3-8B, and what of SmolLM2 (group 3, head_dim 64) and wide heads
    differs. `quick`: each in one type, attention in SmolLM2's shape."""
    from kernels.triton.jit import attention, blocks, gemm, rowwise, sampling

    tiles = tiles_for((capability // 10, capability % 10))
    norm = {"ROWS": 1, "BLOCK": 4096}
    yield Case("rms_norm", rowwise.rms_norm_kernel, norm)
    yield Case("rms_norm of heads", rowwise.rms_norm_kernel, {"ROWS": 32, "BLOCK": 128})
    yield Case("add_rms_norm", rowwise.add_rms_norm_kernel, norm)
    yield Case("silu_mul", rowwise.silu_mul_kernel, {"ROWS": 1, "BLOCK": 2048})
    yield Case("rotary", rowwise.rotary_kernel, {"HEADS": 32, "HALF": 64})
    yield Case("write_kv", rowwise.write_kv_kernel, {"HEADS": 8, "BLOCK": 128})
    heads = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 128}
    yield Case("rotary and write", rowwise.rotary_write_kernel, heads)
    for group, dim, dtype in _ATTENTION_SHAPES[: 1 if quick else None]:
        base = {"GROUP": group, "BLOCK_SIZE": 64, "HEAD_DIM": dim, "DIM": dim, "PARTITION": PARTITION_SIZE}
        item_bytes = 4 if dtype == "fp32" else 2
        for mode, pick, keep in (
            (Mode.EXACT, "long", "all"),
            (Mode.EXACT, "token", "each"),
            (Mode.EXACT, "token", "all"),
            (Mode.EXACT, "single", "each"),
            (Mode.EXACT, "single", "all"),
            (Mode.FAST, "token", "fold"),
        ):
            tile = tiles.attention_for(dim, item_bytes, group, mode, is_decode=pick != "long")
            queries = tile.rows // group if pick == "long" else 1
            constants = {**base, "ROWS": tile.rows, "QUERIES": queries, "PICK": pick, "KEEP": keep}
            label = f"attention {dtype} group {group} head_dim {dim} {mode.value} {pick} {keep}"
            family = f"attention {dtype} {group} {dim}" if mode is Mode.EXACT else ""
            yield Case(
                label, attention.attention_kernel, constants, tile.num_warps, tile.num_stages, dtype,
                family=family,
            )  # fmt: skip
    combine = {"HEAD_DIM": 128, "DIM": 128, "PARTITION": PARTITION_SIZE, "AT_ONCE": 4}
    yield Case("combine", attention.combine_kernel, {**combine, "PICK": "token", "KEEP": "each"}, num_warps=1)
    for dtype in ("bf16",) if quick else ("bf16", "fp32"):
        gemm_tile = tiles.gemm_for(4 if dtype == "fp32" else 2)
        for apart in (True, False):
            product = {
                "ROWS": gemm_tile.rows, "COLUMNS": gemm_tile.columns, "DEPTH": gemm_tile.depth, "WHOLE": True,
                "HAS_BIAS": False, "APART": apart,
            }  # fmt: skip
            yield Case(
                f"linear {dtype} {'parts' if apart else 'whole'}", gemm.gemm_kernel, product,
                gemm_tile.num_warps, gemm_tile.num_stages, dtype, family=f"linear {dtype}",
            )  # fmt: skip
    yield Case("add_parts", gemm.add_parts_kernel, {"PARTS": 8, "BLOCK": 1024, "HAS_BIAS": True})
    move = {"HEADS_FIRST": True, "ROWS": 32, "BLOCK": 128}
    for gather in (True, False):
        kind = "gather" if gather else "scatter"
        types = (("staging", "fp32"),)
        yield Case(f"{kind} blocks", blocks.move_blocks_kernel, {**move, "GATHER": gather}, types=types)
    parts = {"BLOCK": 512, "PARTS": 256}
    for last, by_weight, first in ((False, False, False), (False, True, True), (True, True, True)):
        select = {**parts, "LAST": last, "BY_WEIGHT": by_weight, "FIRST": first}
        kind = f"{'weight' if by_weight else 'count'}{', ties' if last else ''}"
        yield Case(f"select by {kind}", sampling.select_kernel, select, num_warps=8)
    left = {**parts, "FIRST": True, "SECOND": True}
    yield Case("sum_parts", sampling.sum_parts_kernel, left, num_warps=8)
    yield Case("draw", sampling.draw_kernel, left, num_warps=8)
    of_entries = (("rows", "i32"), ("ids", "i32"), ("counts", "i32"))
    yield Case("penalize", sampling.penalize_kernel, {"BLOCK": 256}, types=of_entries)


def compile_case(case: Case, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    known = {**_POINTERS, **dict(case.types)}
    signature, attributes = {}, {}
    for place, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        if name in known:
            signature[name] = "*" + known[name].replace("T", case.dtype)
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
        if name in known or name not in _FLOATS | _UNKNOWN:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": False}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except (TritonError, RuntimeError) as error:  # a pass that fails raises the second
        return Compiled(case.label, error=str(error).strip().split("\n")[-1])
    ptx = made.asm["ptx"]
    found = re.findall(r"(wgmma|mma)(?:\.mma_async)?\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)
    instructions = ", ".join(sorted({" ".join(parts) for parts in found})) or "-"
    registers, stack = _resources(made.asm["cubin"], Path(triton.__file__).parent)
    shared = int(made.metadata.shared)
    most = SHARED_BYTES.get(capability)
    too_much = f"{shared} bytes of shared memory, of {most}" if most is not None and shared > most else None
    return Compiled(case.label, too_much, registers, stack, shared, instructions)


def _resources(cubin: bytes, triton_directory: Path) -> tuple[int, int]:
    """(registers per thread, bytes of stack), as the disassembler of triton's package tells them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton_directory / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{tool} tells no registers: {text.strip()}")
    return int(found[1]), int(found[2])


def why_not() -> str | None:
    """One line that says what is missing to compile here; None: nothing is."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "kernels are compiled with the package `triton`: pip install triton"
    tools = Path(found.origin).parent / "backends/nvidia/bin"
    missing = [tool for tool in ("ptxas", "cuobjdump") if not (tools / tool).exists()]
    return f"this build of triton brings no {' and no '.join(missing)}" if missing else None


def _capability(text: str) -> int:
    """9.0 → 90."""
    found = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if found is None or (int(found[1]), int(found[2])) < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
        raise argparse.ArgumentTypeError(f"`{text}`: one like 9.0, of at least {least}")
    return 10 * int(found[1]) + int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.compile_check")
    parser.add_argument("--capability", type=_capability, default="9.0", help="of the device to compile for")
    parser.add_argument("--only", default="", help="kernels whose label begins so")
    parser.add_argument("--quick", action="store_true", help="each kernel in one type and shape")
    arguments = parser.parse_args()
    if interpreting():
        sys.exit("TRITON_INTERPRET is set: nothing is compiled in the interpreter")
    if reason := why_not():
        sys.exit(reason)
    capability: int = arguments.capability
    print(f"{'kernel':<56}{'registers':>10}{'stack':>7}{'shared':>9}  tensor cores")
    failed = num_compiled = 0
    families: dict[str, set[str]] = {}
    for case in cases(capability, quick=arguments.quick):
        if case.label.startswith(arguments.only):
            num_compiled += 1
            made = compile_case(case, capability)
            failed += made.error is not None
            if case.family:
                families.setdefault(case.family, set()).add(made.instructions)
            line = f"{made.label:<56}{made.registers:>10}{made.stack_bytes:>7}{made.shared_bytes:>9}"
            print(
                f"{line}  {made.instructions}" + (f"  FAILED: {made.error}" if made.error else ""), flush=True
            )
    for family, instructions in families.items():
        if len(instructions) > 1:
            failed += 1
            print(f"{family}: its kernels multiply differently: {sorted(instructions)}")
    if not num_compiled:
        sys.exit(f"no kernel's label begins with `{arguments.only}`")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
