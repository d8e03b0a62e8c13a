"""The router's speed is measured with real processes; here a few streams, so that every part runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.load.records import RequestRecord, RunRecord, Status
from bench.router_speed.__main__ import measure_rate, measure_tokenizing
from bench.router_speed.probes import NUM_LARGE, REFUSED
from bench.router_speed.profile import Samples
from bench.router_speed.site import CpuWatch, SiteSettings
from bench.router_speed.streams import window_of
from cluster.errors import BatonError
from tests.support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer


@pytest.fixture
def settings(tmp_path: Path) -> SiteSettings:
    model = write_byte_tokenizer(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return SiteSettings(
        model_dir=model, num_workers=2, num_streams=4, step_s=1.0, router_core=None, other_core=None
    )


def test_a_row_counts_the_tokens_that_were_read(settings: SiteSettings) -> None:
    row = measure_rate(settings, 40.0, 5.0, with_refusals=True)
    assert row["num_streams"] == 4
    assert 0 < row["tokens_per_s"] < 80
    assert row["added_latency_ms"]["p50"] > 0
    assert row["router_cpu"] > 0
    assert set(row["refused_first_byte_ms"]) == set(REFUSED)


def test_health_is_looked_at_while_prompts_are_tokenized(
    settings: SiteSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.router_speed.probes.LARGE_BYTES", 10_000)
    result = measure_tokenizing(settings)
    assert result["num_prompts"] == NUM_LARGE
    assert result["health_ms"]["p99"] > 0


def test_cpu_is_read_between_two_looks() -> None:
    watch = CpuWatch(1, moments_ns=[0, 100, 200], cpu_s=[0.0, 1.0, 4.0])
    assert watch.used_s(0, 200) == 4.0
    assert watch.used_s(50, 150) == 2.0
    watch.stolen_s = [1.0, 1.0, 1.5]
    assert watch.taken_s(50, 150) == 0.25


def test_streams_that_never_meet_show_nothing() -> None:
    records = [
        RequestRecord(index=index, scheduled_s=0.0, status=Status.OK, chunk_times_s=times)
        for index, times in enumerate(([1.0, 2.0, 5.0], [1.0, 3.0, 6.0]))
    ]
    run = RunRecord(records=records, clients=[], start_unix_s=0.0, wall_s=6.0, is_complete=True)
    assert window_of(run).seconds == 2.0
    records[0].chunk_times_s = [0.5, 0.6, 0.7]
    with pytest.raises(BatonError, match="never ran all at once"):
        window_of(run)


def test_a_profile_names_the_function() -> None:
    samples = Samples()

    def inner() -> None:
        import sys

        samples.take(0, sys._getframe())

    inner()
    assert (
        "100.0%  100.0%  test_router_speed.py:test_a_profile_names_the_function.<locals>.inner"
        in samples.report()
    )
