"""A Ray cluster that others use too: what is planned with is what they leave."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import launch_ray
from cluster.config import ClusterConfig
from cluster.gpu_placement import RayNode
from cluster.launch import joined_site
from cluster.launch_plan import Site, plan_roles

SITE = Site("m", "/tmp/baton-abcdefgh", "/logs", "t" * 32, num_cores=2)
HELD = RayNode("10.0.0.4", num_cpus=8.0, free_cpus=1.0, num_gpus=4.0, free_gpus=2.0)
FREE = RayNode("10.0.0.5", num_cpus=8.0, free_cpus=0.5, num_gpus=0.0, free_gpus=0.0)


def plan(config: ClusterConfig, *nodes: RayNode) -> tuple[list[tuple[float, float]], list[str]]:
    """(CPUs, GPUs) that each worker asks for, and what was said."""
    said: list[str] = []
    site = joined_site(config, SITE, nodes, "127.0.0.1", said.append)
    return [(spec.num_cpus, spec.num_gpus) for spec in plan_roles(config, site) if not spec.is_router], said


def test_workers_ask_for_what_is_free() -> None:
    asked, said = plan(ClusterConfig(backend="auto", decode=3, threads_per_worker=1), HELD, FREE)
    assert asked == [(0.375, 0.5)] * 4
    assert len(said) == 1
    assert "10.0.0.4 has 2 of 4 free" in said[0]


@pytest.mark.parametrize("settings", [{"backend": "cpu"}, {"backend": "triton", "gpus_per_worker": 1.0}])
def test_nothing_is_said_of_gpus_that_nobody_counts_on(settings: dict[str, Any]) -> None:
    asked, said = plan(ClusterConfig(**settings), HELD)
    assert {gpus for _, gpus in asked} == {settings.get("gpus_per_worker", 0.0)}
    assert said == []


def test_what_is_free_is_asked_of_ray_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is all held is missing in its answer; a dead node has nothing."""
    nodes = [
        {"NodeID": name, "Alive": name != "c", "NodeManagerAddress": f"host-{name}", "Resources": own}
        for name, own in (("a", {"CPU": 8.0, "GPU": 2.0}), ("b", {"CPU": 4.0}), ("c", {"GPU": 9.0}))
    ]
    monkeypatch.setattr(launch_ray.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(launch_ray, "available_resources_per_node", lambda: {"a": {"CPU": 3.0}, "b": {}})
    assert launch_ray.living_nodes() == (
        RayNode("host-a", num_cpus=8.0, free_cpus=3.0, num_gpus=2.0, free_gpus=0.0),
        RayNode("host-b", num_cpus=4.0, free_cpus=0.0, num_gpus=0.0, free_gpus=0.0),
    )
