"""Baton's series once more, under the names that autoscalers, gateways and dashboards know from vLLM.

Nothing is counted twice: each family is read from ours when the page is rendered and renamed. Every series
has vLLM's two labels, `model_name` and `engine`; a whole cluster is one engine, "0".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ENGINE = "0"


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """What the model-server protocol of the Gateway API asks for. KV is that of decode workers."""

    num_waiting: int
    num_running: int
    kv_usage: float  # 0 to 1
    block_size: int
    num_blocks: int


class VllmNames(Collector):
    """`mirrored` maps vLLM's name, without `vllm:` and `_total`, to our collector."""

    def __init__(
        self, model: str, mirrored: Mapping[str, Collector], load: Callable[[], ClusterLoad]
    ) -> None:
        self._labels = {"model_name": model, "engine": ENGINE}
        self._mirrored = mirrored
        self._load = load

    def describe(self) -> Iterable[Metric]:
        """Known only when they are read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        for name, value in (
            ("num_requests_waiting", load.num_waiting),
            ("num_requests_running", load.num_running),
            ("kv_cache_usage_perc", load.kv_usage),
        ):
            yield self._gauge(name, value)
        sizes = {"block_size": str(load.block_size), "num_gpu_blocks": str(load.num_blocks)}
        yield self._gauge("cache_config_info", 1, sizes)
        for name, source in self._mirrored.items():
            for family in source.collect():
                yield self._renamed(family, f"vllm:{name}")

    def _gauge(self, name: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        labels = self._labels | dict(more or {})
        family = GaugeMetricFamily(f"vllm:{name}", f"Baton's, as vLLM names it: {name}", labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _renamed(self, family: Metric, name: str) -> Metric:
        mirror = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix != "_created":
                mirror.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
        return mirror
