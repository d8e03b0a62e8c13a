"""Whether a run's figures may be believed.

1. `judge` reads the records and the summary.
2. Each reason is one sentence with its numbers; a run without reasons is valid.
3. Cautions say what could not be checked; they do not make a run invalid.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.load.records import ClientReport, RequestRecord, RunRecord, Status
from bench.load.slo import Slo, SloMetric
from bench.load.summary import Summary

MAX_LAG_SHARE_OF_TTFT = 0.05
MAX_LAG_WITHOUT_SLO_S = 0.010
MAX_CPU_SHARE = 0.90  # of the one core that a client process can use


class Validity(msgspec.Struct, frozen=True):
    invalid_reasons: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return not self.invalid_reasons


def judge(run: RunRecord, summary: Summary) -> Validity:
    reasons = [
        *_incomplete(run),
        *_empty(summary),
        *_late(summary),
        *_busy(run.clients),
        *_other_lengths(run.records, "input"),
        *_other_lengths(run.records, "output"),
    ]
    return Validity(tuple(reasons), tuple(_unchecked(run.records)))


def max_send_lag_s(slos: Sequence[Slo]) -> float:
    """5 % of the TTFT bound, since the lag is part of every TTFT; 10 ms without one."""
    bounds_s = [slo.bound_s for slo in slos if slo.metric is SloMetric.TTFT]
    return MAX_LAG_SHARE_OF_TTFT * min(bounds_s) if bounds_s else MAX_LAG_WITHOUT_SLO_S


def cpu_share(client: ClientReport) -> float | None:
    """Share of one core that a client process used; None if it did not run for any time."""
    return client.cpu_s / client.wall_s if client.wall_s > 0 else None


def _incomplete(run: RunRecord) -> list[str]:
    if run.is_complete:
        return []
    unfinished = sum(record.status in (Status.CANCELLED, Status.SKIPPED) for record in run.records)
    why = "; ".join(run.notes) or "it was interrupted"
    return [
        f"The run is not complete ({why}): {unfinished} of {len(run.records)} requests were cancelled or "
        "skipped."
    ]


def _empty(summary: Summary) -> list[str]:
    if summary.num_offered:
        return []
    return [
        f"No request was scheduled in the window ({summary.span.rule}), out of {summary.num_run_offered} "
        "offered: run longer or leave out less."
    ]


def _late(summary: Summary) -> list[str]:
    lag_s = summary.send_lag.percentiles_s["99"]
    limit_s = max_send_lag_s(summary.slos)
    if lag_s is None or lag_s <= limit_s:
        return []
    has_slo = any(slo.metric is SloMetric.TTFT for slo in summary.slos)
    of_what = (
        f"{MAX_LAG_SHARE_OF_TTFT:.0%} of the TTFT bound" if has_slo else "the limit without a TTFT bound"
    )
    return [
        f"The client sent late: send lag p99 {lag_s * 1e3:.2f} ms over {summary.send_lag.num} requests is "
        f"above {limit_s * 1e3:.2f} ms ({of_what}); use more client processes or a lower rate."
    ]


def _busy(clients: Sequence[ClientReport]) -> list[str]:
    shares = {client.process: cpu_share(client) for client in clients}
    return [
        f"Client process {process} was short of CPU: it used {share:.0%} of a core, above "
        f"{MAX_CPU_SHARE:.0%}; use more client processes or a lower rate."
        for process, share in shares.items()
        if share is not None and share > MAX_CPU_SHARE
    ]


def _lengths(record: RequestRecord, side: str) -> tuple[int | None, int | None]:
    """Planned and reported tokens."""
    if side == "input":
        return record.planned_input_tokens, record.input_tokens
    return record.planned_output_tokens, record.output_tokens


def _other_lengths(records: Sequence[RequestRecord], side: str) -> list[str]:
    planned = 0
    wrong: list[tuple[int, int, int]] = []
    for record in records:
        want, got = _lengths(record, side)
        if record.status is not Status.OK or want is None:
            continue
        planned += 1
        if got is not None and got != want:
            wrong.append((record.index, want, got))
    if not wrong:
        return []
    index, want, got = wrong[0]
    return [
        f"{len(wrong)} of {planned} answers had another {side} length than planned "
        f"(request {index}: {got} tokens by the server's usage, {want} planned)."
    ]


def _unchecked(records: Sequence[RequestRecord]) -> list[str]:
    done = [record for record in records if record.status is Status.OK]
    cautions = []
    for side in ("input", "output"):
        pairs = [_lengths(record, side) for record in done]
        missing = sum(want is not None and got is None for want, got in pairs)
        if missing:
            cautions.append(
                f"{missing} of {len(done)} answers carried no usage, so their {side} length was not checked."
            )
    uncounted = sum(record.output_tokens is None and not record.chunk_tokens for record in done)
    if uncounted:
        cautions.append(
            f"The output of {uncounted} of {len(done)} answers was counted as one token per chunk."
        )
    return cautions
