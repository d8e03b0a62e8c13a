"""The x-slo- headers: what they ask for, and that nothing in them is silently ignored."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequest
from cluster.request import RequestSlo
from cluster.wire.messages import PriorityClass
from router.slo_headers import slo_of
from tests.support.gateway import RunningGateway, check_error


def parse(*headers: tuple[str, str]) -> RequestSlo:
    pairs = [(key.encode(), value.encode("latin-1")) for key, value in headers]
    return slo_of({"headers": [(b"content-type", b"application/json"), *pairs]})


def refused(*headers: tuple[str, str]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as failed:
        parse(*headers)
    assert failed.value.status == 400
    return failed.value


def test_without_headers_the_clusters_promise_holds() -> None:
    assert parse() == RequestSlo()


def test_all_of_them() -> None:
    slo = parse(
        ("x-slo-ttft-ms", "250"),
        ("x-slo-tpot-ms", "12.5"),
        ("x-slo-gap-ms", " 80 "),
        ("x-slo-class", "batch"),
    )
    assert slo == RequestSlo(ttft_s=0.25, tpot_s=0.0125, gap_s=0.08, priority_class=PriorityClass.BATCH)


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-gap-ms"])
@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1e3", "nan", "inf", "0.0", "1,5", "1.2.3", "1_0", "\u00b2", "86400001", "9" * 400, "."],
)
def test_impossible_values_are_refused_by_name(name: str, text: str) -> None:
    error = refused((name, text))
    assert error.param == name
    assert name in error.message
    assert "milliseconds" in error.message


def test_other_mistakes() -> None:
    assert "`interactive` or `batch`" in refused(("x-slo-class", "urgent")).message
    assert "twice" in refused(("x-slo-ttft-ms", "1"), ("x-slo-ttft-ms", "1")).message
    unknown = refused(("x-slo-ttft", "100"))
    assert "`x-slo-ttft-ms`" in unknown.message
    assert unknown.param == "x-slo-ttft"
    impossible = refused(("x-slo-tpot-ms", "50"), ("x-slo-gap-ms", "20"))
    assert impossible.param == "x-slo-gap-ms"
    assert parse(("x-slo-gap-ms", "20")).gap_s == 0.02


@given(text=st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_text_is_a_promise_or_an_error(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        slo = parse(("x-slo-ttft-ms", text))
        assert slo.ttft_s is not None
        assert 0 < slo.ttft_s <= 86_400


# ---- over HTTP


def test_they_reach_the_cluster_or_are_refused(gateway: RunningGateway) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    headers = {"X-SLO-TTFT-ms": "300", "x-slo-tpot-ms": "40", "x-slo-class": "batch"}
    assert gateway.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    slo = gateway.cluster.streams[-1].spec.slo
    assert slo == RequestSlo(ttft_s=0.3, tpot_s=0.04, priority_class=PriorityClass.BATCH)
    num_streams = len(gateway.cluster.streams)
    refusal = gateway.client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "soon"})
    message = check_error(refusal, 400, param="x-slo-ttft-ms")
    assert "milliseconds" in message
    assert len(gateway.cluster.streams) == num_streams
    chat = gateway.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        headers={"x-slo-gap-ms": "100"},
    )
    assert chat.status_code == 200
    assert gateway.cluster.streams[-1].spec.slo == RequestSlo(gap_s=0.1)
