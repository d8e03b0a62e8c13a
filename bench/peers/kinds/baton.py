"""Baton itself, disaggregated and colocated, 16-bit and int8, as `baton serve` starts it.

One row is measured only if it is named: disaggregated with every prompt on the prefill worker, whatever that
costs. It says what elastic placement is worth. Where Baton keeps a GGUF file's codes, its default rows read
these and compute what bf16 weights give, bit for bit; a row of its own has all weights in 16 bits, as 16-bit
peers do.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.load.figures.slo import Slo, SloMetric
from bench.peers.kinds.common import model_step
from bench.peers.peer import PORT, Peer, Places

PROMISES = {SloMetric.TTFT: "--slo-ttft-ms", SloMetric.TPOT: "--slo-tpot-ms", SloMetric.GAP: "--slo-gap-ms"}
CODED = "the GGUF's own codes, as bf16 weights give, bit for bit"


def baton_peers(
    places: Places, cores: Sequence[int], *, is_text: bool, slos: Sequence[Slo] = ()
) -> list[Peer]:
    """`slos`: of the search. Baton schedules by what it promises, so it is told, as by an operator."""
    guesses: tuple[str, ...] = ("--speculation", "off")
    why = "off: answers to random ids repeat themselves, so guesses gain too much"
    if is_text:
        guesses, why = (), "on, its default: guesses from the request's own prompt and answer"
    promises = [
        word
        for slo in slos
        if slo.metric in PROMISES
        for word in (PROMISES[slo.metric], f"{slo.bound_s * 1e3:g}")
    ]

    def peer(
        name: str,
        title: str,
        num_prefill: int,
        *,
        is_int8: bool = False,
        expands: bool = False,
        why_unusual: str | None = None,
    ) -> Peer:
        serve = (places.python, "-m", "cluster.cli", "serve", "--launcher", "local")
        argv = (*serve, "--model", places.model, "--port", PORT, *guesses, *promises)
        coded_bits = None if is_int8 or expands else places.coded_bits
        formats: tuple[str, ...] = ("--quantization", "int8", "--kv-dtype", "int8") if is_int8 else ()
        formats += ("--gguf-weights", "expand") if expands else ()
        placement = ("--placement", "remote") if why_unusual is not None else ()
        note = (
            f"{num_prefill} prefill and 1 decode worker share the cores"
            if num_prefill
            else f"1 worker for both phases, {len(cores)} cores"
        )
        precision, bits = "bf16 weights", 16.0
        if is_int8:
            precision, bits = "int8 weights and activations, int8 KV", 8.0
        elif coded_bits is not None:
            precision, bits = CODED, coded_bits
        return Peer(
            name=name,
            title=title,
            precision=precision,
            weight_bits=bits,
            kv_bits=8 if is_int8 else 16,
            arithmetic_bits=None if coded_bits is None else 16.0,
            settings={
                "workers": note,
                **({"formats": " ".join(formats)} if formats else {}),
                **({"placement": "--placement remote (default: elastic)"} if placement else {}),
                **({"targets": f"{' '.join(promises)}: those of the search"} if promises else {}),
                "launcher": "--launcher local: no request passes Ray, and it would take some of a core",
                "speculation": why,
                "everything else": "defaults of `baton serve`",
            },
            argv=(*argv, "--prefill", str(num_prefill), "--decode", "1", *formats, *placement),
            model="",  # whatever it serves
            environment={"PYTHONPATH": str(places.repository)},
            steps=(model_step(places),),
            python=places.python,
            distributions=("baton-serve", "torch"),
            is_baton=True,
            makes_guesses=is_text,
            why_unusual=why_unusual,
        )

    expanded = [peer("baton-colocated-expanded", "Baton, colocated, 16 bits in memory", 0, expands=True)]
    return [
        peer("baton-disaggregated", "Baton, disaggregated", 1),
        peer(
            "baton-always-remote",
            "Baton, 1+1, always remote",
            1,
            why_unusual="only if named: every prompt on the prefill worker, to compare elastic with",
        ),
        peer("baton-colocated", "Baton, colocated", 0),
        *(expanded if places.coded_bits is not None else []),
        peer("baton-colocated-int8", "Baton, colocated, int8", 0, is_int8=True),
    ]
