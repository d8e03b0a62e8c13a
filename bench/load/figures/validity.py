"""Whether a run's figures may be believed.

1. `judge` reads the records and the summary.
2. Each reason is one sentence with its numbers; a run without reasons is valid.
3. Cautions say what could not be checked or was not as it should be; they do not make a run invalid.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.load.figures.freeze import freeze_cautions
from bench.load.figures.outage import Outage, find_outage, find_silence
from bench.load.figures.punctuality import (
    MAX_LAG_SHARE_OF_TTFT,
    MAX_READ_SHARE,
    MAX_READ_WITHOUT_SLO_S,
    read_lateness,
    send_lateness,
)
from bench.load.figures.punctuality import max_send_lag_s as max_send_lag_s
from bench.load.figures.slo import Slo, SloMetric
from bench.load.figures.summary import Summary
from bench.load.records import ClientReport, RequestRecord, RunRecord, Status

BUSY_CPU_SHARE = 0.25  # from here on, lateness is put down to the client's own work
MIN_NUM_IN_WINDOW = 10  # requests; fewer, and most of the run left out, is a caution
MAX_CPU_SHARE = 0.90  # of the one core that a client process can use


class Validity(msgspec.Struct, frozen=True):
    invalid_reasons: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return not self.invalid_reasons


def judge(run: RunRecord, summary: Summary) -> Validity:
    measured = [record for record in run.records if summary.span.contains(record)]
    read_late, is_read_too_late = _read_late(measured, run.clients, summary.slos)
    reasons = [
        *_incomplete(run),
        *_empty(summary),
        *_gone(run),
        *_client_limits(run.records),
        *_sent_late(measured, run.clients, summary),
        *(read_late if is_read_too_late else ()),
        *_busy(run.clients),
        *_other_lengths(run.records, "input"),
        *_other_lengths(run.records, "output"),
    ]
    cautions = [
        *_few(summary),
        *(() if is_read_too_late else read_late),
        *(_outage(run) if run.server_gone is None else ()),
        *freeze_cautions(run),
        *_without_token(measured),
        *_retried(run.records),
        *_unchecked(run.records),
    ]
    return Validity(tuple(reasons), tuple(cautions))


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
    if not summary.num_run_offered:
        return ["No request was offered: there is nothing to measure."]
    left_out = summary.span.left_out
    return [
        f"{left_out[:1].upper()}{left_out[1:]} left none of the {_requests(summary.num_run_offered)} to "
        "measure: run longer, or leave out less."
    ]


def _few(summary: Summary) -> list[str]:
    num, num_run, left_out = summary.num_offered, summary.num_run_offered, summary.span.left_out
    if not 0 < num < MIN_NUM_IN_WINDOW or 2 * num > num_run:
        return []
    return [
        f"{left_out[:1].upper()}{left_out[1:]} left only {num} of the {_requests(num_run)} to measure: run "
        "longer, or leave out less."
    ]


def _requests(num: int) -> str:
    return f"{num} request{'' if num == 1 else 's'}"


def _client_limits(records: Sequence[RequestRecord]) -> list[str]:
    """What the client could not send says nothing about the server."""
    unsent = [record for record in records if record.status is Status.CLIENT]
    if not unsent:
        return []
    return [
        f"The client could not send {len(unsent)} of {len(records)} requests, the first after "
        f"{unsent[0].scheduled_s:.1f} s ({unsent[0].error}): raise its limit of open files (ulimit -n, and "
        "-Hn above it), use more --processes or client machines, or offer less at once."
    ]


def _outage(run: RunRecord) -> list[str]:
    records = run.records
    outage = find_outage(records)
    if outage is None:
        refused = [record for record in records if record.is_unreachable]
        if not refused:
            return []
        return [
            f"{len(refused)} of {len(records)} requests could open no connection, the first one due after "
            f"{refused[0].scheduled_s:.1f} s, before any had succeeded: the server was not there."
        ]
    until = "until the end, and then it answered again" if run.is_complete else "until the end"
    if outage.end_s is not None:
        until = f"until answers came again after {outage.end_s:.1f} s"
    return [
        f"{_away(outage)}: {outage.num_refused} connections could not be opened, {until}. "
        f"{_after(outage, records)}"
    ]


def _gone(run: RunRecord) -> list[str]:
    """A server that stopped answering for good was not measured: the figures depend on the moment of its end,
    and on how long the load went on without it. One that came back was, with its absence.
    """
    if run.server_gone is None:
        return []
    outage = find_outage(run.records)
    if outage is not None:
        return [
            f"{_away(outage)}, and did not come back ({run.server_gone}): {outage.num_refused} connections "
            f"could not be opened. {_after(outage, run.records)}"
        ]
    silence = find_silence(run.records)
    num_ok, num = sum(record.status is Status.OK for record in run.records), len(run.records)
    when = f"after {silence.start_s:.1f} s" if silence.was_heard else "before it had answered at all"
    since = "" if silence.was_heard else f" ({silence.start_s:.1f} s)"
    return [
        f"The server stopped answering {when} ({run.server_gone}), when {_requests(num_ok)} had succeeded. "
        f"{silence.num_offered_after} of the {num} offered requests were due after that moment{since}; the "
        "figures count them all."
    ]


def _away(outage: Outage) -> str:
    when = f"when {_requests(outage.num_ok_before)} had succeeded"
    return f"The server went away after {outage.start_s:.1f} s, {when}"


def _after(outage: Outage, records: Sequence[RequestRecord]) -> str:
    return (
        f"{outage.num_offered_after} of the {len(records)} offered requests were due after that moment; the "
        "figures count them all."
    )


def _without_token(records: Sequence[RequestRecord]) -> list[str]:
    done = [record for record in records if record.status is Status.OK]
    num = sum(not record.chunk_times_s for record in done)
    if not num:
        return []
    return [
        f"{num} of {len(done)} answers that ended in good order had no token: they meet no SLO, and have no "
        "TTFT."
    ]


def _sent_late(
    records: Sequence[RequestRecord], clients: Sequence[ClientReport], summary: Summary
) -> list[str]:
    late = send_lateness(records, summary.slos)
    if not late.is_too_much:
        return []
    has_slo = any(slo.metric is SloMetric.TTFT for slo in summary.slos)
    of_what = (
        f"{MAX_LAG_SHARE_OF_TTFT:.0%} of the TTFT bound" if has_slo else "the limit without a TTFT bound"
    )
    p99_s = summary.send_lag.percentiles_s["99"] or 0.0
    return [
        f"The client sent late: the send lag of {late.num_late} of {late.num} requests is above "
        f"{max_send_lag_s(summary.slos) * 1e3:.2f} ms ({of_what}), p99 {p99_s * 1e3:.2f} ms, longest "
        f"{late.worst_s * 1e3:.2f} ms; {_advice(clients)}."
    ]


def _read_late(
    records: Sequence[RequestRecord], clients: Sequence[ClientReport], slos: Sequence[Slo]
) -> tuple[list[str], bool]:
    """What happened, if anything did; and whether it is too much."""
    late = read_lateness(records, clients, slos)
    if not late.num_late:
        return [], False
    off = (
        f"a figure may be off by more than {MAX_READ_SHARE:.0%} of its SLO bound"
        if slos
        else f"a chunk may have been read more than {MAX_READ_WITHOUT_SLO_S * 1e3:.0f} ms late"
    )
    sentence = (
        f"The client stood still: in {late.num_late} of {late.num} answers {off} (longest delay of a chunk "
        f"{late.worst_s * 1e3:.0f} ms)"
    )
    return [f"{sentence}; {_advice(clients)}." if late.is_too_much else f"{sentence}."], late.is_too_much


def _advice(clients: Sequence[ClientReport]) -> str:
    """What to do about a late client, by what is known of it."""
    share = max((cpu_share(client) or 0.0 for client in clients), default=0.0)
    if share > BUSY_CPU_SHARE:
        return (
            f"its busiest process used {share:.0%} of a core: use more client processes, or offer less "
            "load at once"
        )
    return (
        f"it used at most {share:.1%} of a core, so the machine was busy with something else, or held it "
        "up: keep a core free for the client, and measure again"
    )


def _busy(clients: Sequence[ClientReport]) -> list[str]:
    shares = {client.process: cpu_share(client) for client in clients}
    return [
        f"Client process {process} was short of CPU: it used {share:.0%} of a core, above "
        f"{MAX_CPU_SHARE:.0%}; use more client processes, or offer less load at once."
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


def _retried(records: Sequence[RequestRecord]) -> list[str]:
    num = sum(record.num_retries > 0 for record in records)
    if not num:
        return []
    return [
        f"{num} of {len(records)} requests were sent a second time, since the server had closed the "
        "connection that was kept alive for them; the lost time counts in their latencies."
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
