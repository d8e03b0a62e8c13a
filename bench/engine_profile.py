"""Where the time of a step goes, by the stages of the compiled forward pass.

The library's own stopwatch (`kernels/cpu/stopwatch.h`) adds up work and waiting per thread and stage. Of some
steps the fastest is shown: time at work and time waiting for other threads at a stage's end, both as means
over threads, and for products the rates that the work amounts to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from bench.engine_cases import Case
from bench.weight_reads import WeightReads
from cluster.engine.model_spec import ModelSpec
from cluster.engine.runner import ModelRunner
from kernels.cpu.native_forward import STAGES, NativeForward


def matrix_elements(spec: ModelSpec) -> dict[str, int]:
    """Of all layers' matrices together, by the stage that multiplies with them."""
    layers, hidden, inner = spec.num_layers, spec.hidden_size, spec.intermediate_size
    return {
        "qkv": layers * hidden * (spec.query_size + 2 * spec.kv_size),
        "output": layers * hidden * spec.query_size,
        "gate and up": layers * hidden * 2 * inner,
        "down": layers * hidden * inner,
        "logits": hidden * spec.vocab_size,
    }


def rows_of(case: Case, stage: str) -> int:
    return case.num_seqs if stage == "logits" else case.num_tokens


def mean_bytes(case: Case, spec: ModelSpec, reads: WeightReads) -> float:
    """That a step of `case` reads per element, over all matrices."""
    elements = matrix_elements(spec)
    read = sum(count * reads[stage].of(rows_of(case, stage)) for stage, count in elements.items())
    return read / sum(elements.values())


def profile_case(
    runner: ModelRunner,
    spec: ModelSpec,
    reads: WeightReads,
    case: Case,
    run: Callable[[], object],
    budget_s: float,
) -> str:
    """The table of the fastest of as many steps of `case` (`run` does one) as fit the budget, at least two.

    Raises:
        TypeError: the runner's model has no compiled forward pass.
    """
    fused = runner.decoder.fused
    if not isinstance(fused, NativeForward):
        raise TypeError("only the compiled forward pass has a profile")
    run()
    best_s, best, spent_s, count = float("inf"), None, 0.0, 0
    try:
        while count < 2 or spent_s < budget_s:
            seconds = fused.start_profile()
            start_s = time.perf_counter()
            run()
            elapsed_s = time.perf_counter() - start_s
            if elapsed_s < best_s:
                best_s, best = elapsed_s, seconds
            spent_s, count = spent_s + elapsed_s, count + 1
    finally:
        fused.stop_profile()
    assert best is not None
    return profile_table(case, best_s, best, matrix_elements(spec), reads)


def profile_table(
    case: Case, step_s: float, seconds: Tensor, elements: Mapping[str, int], reads: WeightReads
) -> str:
    """`seconds` [threads, stages, 2 (work, wait)] of a step of `step_s`; `elements` as `matrix_elements`."""
    walked = seconds[seconds.sum(dim=(1, 2)) > 0]  # others only helped
    means = walked.mean(dim=0).tolist()
    lines = [
        f"{case.name}: {step_s * 1e3:.2f} ms a step, {case.num_tokens / step_s:.1f} tok/s",
        f"{'stage':<24}{'work ms':>10}{'wait ms':>10}{'share':>8}{'GB/s':>8}{'GMAC/s':>8}",
    ]
    for stage, (work_s, wait_s) in zip(STAGES, means, strict=True):
        rates = ""
        if stage in elements and work_s > 0:
            num_rows = rows_of(case, stage)
            read = elements[stage] * reads[stage].of(num_rows) / work_s
            macs = elements[stage] * num_rows / work_s
            rates = f"{read / 1e9:>8.1f}{macs / 1e9:>8.1f}"
        share = (work_s + wait_s) / step_s
        lines.append(f"{stage:<24}{work_s * 1e3:>10.2f}{wait_s * 1e3:>10.2f}{share:>8.1%}{rates}")
    inside_s, waiting_s = sum(map(sum, means)), sum(wait for _, wait in means)
    lines.append(f"{'all stages':<24}{(inside_s - waiting_s) * 1e3:>10.2f}{waiting_s * 1e3:>10.2f}")
    outside = f"{'packing, sampling, rest':<24}{(step_s - inside_s) * 1e3:>10.2f}"
    return "\n".join([*lines, f"{outside}{'':>10}{1 - inside_s / step_s:>8.1%}"])
