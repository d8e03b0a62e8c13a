"""Baton itself, disaggregated and colocated, as `baton serve` starts it."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.kinds.common import model_step
from bench.peers.peer import PORT, Peer, Places


def baton_peers(places: Places, cores: Sequence[int]) -> list[Peer]:
    def peer(name: str, title: str, num_prefill: int, note: str) -> Peer:
        argv = (places.python, "-m", "cluster.cli", "serve", "--model", places.model, "--port", PORT)
        return Peer(
            name=name,
            title=title,
            precision="bf16 weights",
            weight_bits=16,
            settings={"workers": note, "everything else": "defaults of `baton serve`"},
            argv=(*argv, "--prefill", str(num_prefill), "--decode", "1"),
            model="",  # whatever it serves
            environment={"PYTHONPATH": str(places.repository)},
            steps=(model_step(places),),
            python=places.python,
            distributions=("baton-serve", "torch"),
            is_baton=True,
        )

    return [
        peer(
            "baton-disaggregated", "Baton, disaggregated", 1, "1 prefill and 1 decode worker share the cores"
        ),
        peer("baton-colocated", "Baton, colocated", 0, f"1 worker for both phases, {len(cores)} cores"),
    ]
