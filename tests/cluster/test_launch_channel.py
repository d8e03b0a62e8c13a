"""Every message of the launcher's channel arrives as it was sent, and no other."""

from __future__ import annotations

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.launch_channel import (
    MAX_PACKET_BYTES,
    Alive,
    Ended,
    Loaded,
    Probe,
    Serve,
    Serving,
    Stop,
    channel_pair,
    from_launcher,
    from_role,
    to_packet,
)
from cluster.launch_plan import Site, plan_roles

SITE = Site(
    served_model_name="m",
    runtime_dir="/tmp/baton-x",
    log_dir="/logs",
    cluster_token="t" * 32,
    num_cores=64,
    core_board="/proc/1/fd/9",
)


def test_messages_arrive_whole_and_in_order() -> None:
    specs = plan_roles(ClusterConfig(prefill=100, decode=100, threads_per_worker=1), SITE)
    told = [*(Serve(spec.config) for spec in specs), Probe(3), Stop()]
    said = [Loaded(""), Loaded("a: b"), Serving(), Alive(3), Ended("it broke")]
    launcher, role = channel_pair()
    with launcher, role:
        for message in told:
            launcher.send(to_packet(message))
            assert from_launcher(role.recv(MAX_PACKET_BYTES)) == message
        for message in said:
            role.send(to_packet(message))
        assert [from_role(launcher.recv(MAX_PACKET_BYTES)) for _ in said] == said
        launcher.close()
        assert role.recv(MAX_PACKET_BYTES) == b""


def test_the_token_is_in_no_repr() -> None:
    for spec in plan_roles(ClusterConfig(), SITE):
        assert SITE.cluster_token not in repr(Serve(spec.config))


def test_what_is_no_message_is_refused() -> None:
    for parse in (from_launcher, from_role):
        for packet in (b"", b"{", b"{}", b'{"type": "other"}', b'{"type": "stop", "more": 1}'):
            with pytest.raises(msgspec.DecodeError):
                parse(packet)
    with pytest.raises(msgspec.DecodeError):
        from_launcher(to_packet(Serving()))
