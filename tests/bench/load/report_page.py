"""What every page of the report keeps, and a run made with the real result writer."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.window import Window
from bench.load.plan import Arrival, Plan
from bench.load.report import ReportRun
from bench.load.results.result import build_result
from tests.bench.load.report_data import make_run

VOID = {"meta", "line", "path", "rect", "circle", "polygon"}


class Nesting(HTMLParser):
    """Fails on a tag that closes what is not open; keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check(page: str) -> list[ET.Element]:
    """Every rule each page keeps; its charts."""
    page.encode()
    reader = Nesting()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    for name, attributes in reader.tags:
        assert name not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert all(not key.startswith("on") for key in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert [name for name, _ in reader.tags].count("script") == 1
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for _, attributes in reader.tags if "href" in attributes}
    assert targets == {f"#{one}" for one in ids}
    charts = [ET.fromstring(chart) for chart in re.findall(r"<svg .*?</svg>", page, re.DOTALL)]
    for chart in charts:
        assert chart.get("aria-label")
        assert chart.get("role") in ("img", "group")
        for node in chart.iter():
            for key in ("x", "y", "x1", "y1", "cx", "cy", "width", "height", "d", "points"):
                assert re.fullmatch(r"[-0-9. ,MLZ]*", node.get(key, "")), (key, node.get(key))
    return charts


def titles(page: str) -> list[str]:
    return re.findall(r"<figcaption><b>(.*?)</b>", page)


def left_out(page: str) -> dict[str, str]:
    return dict(re.findall(r"<li>([^<]*?): left out, (.*?)\.</li>", page))


def real_run(rate: float = 3.0, seed: int = 1, num: int = 60, **changes: Any) -> ReportRun:
    run = make_run(rate, num, seed, fail_every=changes.pop("fail_every", 9))
    arrival = changes.pop("arrival", Arrival(kind="poisson", seed=seed, rate=rate))
    window = changes.pop("window", Window())
    plan = Plan(
        endpoint="/v1/completions",
        shared_body={"model": "demo"},
        requests=(),
        arrival=arrival,
        workload={"kind": "lognormal", "input_tokens": "lognormal:mean=300"},
    )
    slos = parse_slos("ttft=250ms,tpot=40ms,gap=150ms")
    environment = {"backend": "baton", "num_cores": 2, "server": {"version": "1"}, "client": {"cpu": "x"}}
    return ReportRun({**build_result(plan, run, summarize(run, slos, window), environment), **changes}, run)
