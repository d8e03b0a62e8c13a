"""What would be run, without running it: no network, no environment."""

import dataclasses
from pathlib import Path

import pytest

from bench.load.figures.slo import parse_slos
from bench.peers.catalogue import all_peers
from bench.peers.options import closed_loops
from bench.peers.peer import Peer, Places, why_not
from cluster.errors import ConfigError

PLACES = Places(
    cache=Path("/cache"),
    repository=Path("/repo"),
    python="/repo/.venv/bin/python",
    model="demo",
    gguf=Path("/models/demo.gguf"),
    tcmalloc=Path("/lib/libtcmalloc.so"),
)
PEERS = {peer.name: peer for peer in all_peers(PLACES, [0, 1])}
AVX2 = frozenset({"avx2", "fma"})


def environment_of(peer: Peer) -> set[str]:
    return {str(step.home) for step in peer.steps}


def test_names_are_unique_and_baton_comes_first() -> None:
    assert len(PEERS) == len(all_peers(PLACES, [0, 1]))
    assert [peer.is_baton for peer in PEERS.values()].index(False) == sum(p.is_baton for p in PEERS.values())


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_peer_is_whole(peer: Peer) -> None:
    assert peer.argv.count("{port}") == 1
    assert "8123" in peer.command(8123)
    assert not any("{" in part for part in peer.command(8123))
    assert peer.settings
    assert peer.python is not None
    assert peer.distributions
    assert all(step.home.is_relative_to(PLACES.cache) for step in peer.steps)


@pytest.mark.parametrize("peer", [p for p in PEERS.values() if not p.is_baton], ids=lambda p: p.name)
def test_peers_do_not_see_batons_packages(peer: Peer) -> None:
    assert peer.environment.get("PYTHONPATH", str(PLACES.imports)) == str(PLACES.imports)


def test_shared_steps_are_equal_so_that_they_run_once() -> None:
    f16, int8 = PEERS["openvino-f16"].steps, PEERS["openvino-int8"].steps
    assert set(f16) & set(int8) == set(f16) - {f16[-1]}
    assert f16[-1] != int8[-1]


def test_steps_come_in_an_order_that_works() -> None:
    for peer in PEERS.values():
        made = set()
        for step in peer.steps:
            program = Path(step.argv[0])
            if program.is_relative_to(PLACES.cache):
                assert program.parents[1] in made, f"{peer.name}: {step.title}"
            made.add(step.home)


def test_baton_runs_both_ways() -> None:
    assert PEERS["baton-disaggregated"].argv[-4:] == ("--prefill", "1", "--decode", "1")
    assert PEERS["baton-colocated"].argv[-4:] == ("--prefill", "0", "--decode", "1")


def test_on_text_everyone_guesses_and_reuses_as_it_does_by_default() -> None:
    text = {peer.name: peer for peer in all_peers(PLACES, [0, 1], is_text=True)}
    assert list(text) == list(PEERS)
    for name, peer in text.items():
        assert peer.makes_guesses == peer.is_baton, name
        left_out = {*PEERS[name].argv} - {*peer.argv}
        expected = {"--speculation", "off"} if peer.is_baton else set()
        expected |= {"--no-enable-prefix-caching"} if name.startswith("vllm") else set()
        assert left_out == expected, name
        assert {*peer.argv} <= {*PEERS[name].argv}, name
        assert any("default" in peer.settings.get(key, "") for key in ("speculation", "prompt lookup")), name
    assert not any(peer.makes_guesses for peer in PEERS.values())


def test_baton_is_told_what_a_search_asks_for_and_promises_that() -> None:
    slos = parse_slos("ttft=0.5s,tpot=50ms,gap=0.2s,e2e=9s")
    told = {peer.name: peer for peer in all_peers(PLACES, [0, 1], slos=slos)}
    promises = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "50", "--slo-gap-ms", "200")
    for name, peer in PEERS.items():
        extra = [word for word in told[name].argv if word not in peer.argv]
        assert tuple(extra) == (promises if peer.is_baton else ()), name
        assert ("targets" in told[name].settings) == peer.is_baton, name


def test_the_row_with_every_prompt_remote_is_measured_only_if_named() -> None:
    remote = PEERS["baton-always-remote"]
    assert not remote.is_usual
    assert remote.is_baton
    assert remote.argv == (*PEERS["baton-disaggregated"].argv, "--placement", "remote")
    assert remote.settings["placement"].startswith("--placement remote")
    usual = [peer.name for peer in PEERS.values() if peer.is_baton and peer.is_usual]
    assert usual == ["baton-disaggregated", "baton-colocated", "baton-colocated-int8"]


def test_where_baton_keeps_codes_one_row_more_has_16_bits_in_memory() -> None:
    places = dataclasses.replace(PLACES, coded_bits=5.7)
    keeping = {peer.name: peer for peer in all_peers(places, [0, 1])}
    assert set(keeping) - set(PEERS) == {"baton-colocated-expanded"}
    default, expanded = keeping["baton-colocated"], keeping["baton-colocated-expanded"]
    assert default.argv == PEERS["baton-colocated"].argv
    assert (default.weight_bits, default.arithmetic_bits) == (5.7, 16)
    assert {*expanded.argv} - {*default.argv} == {"--gguf-weights", "expand"}
    assert (expanded.weight_bits, expanded.precision) == (16, PEERS["baton-colocated"].precision)
    assert keeping["baton-colocated-int8"] == PEERS["baton-colocated-int8"]


def test_vllm_gets_all_cores_and_its_allocator() -> None:
    environment = PEERS["vllm-float32"].environment
    assert environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert environment["LD_PRELOAD"] == "/lib/libtcmalloc.so:/cache/venvs/vllm/lib/libiomp5.so"


def test_cores_that_are_not_neighbours_are_named_one_by_one() -> None:
    scattered = {peer.name: peer for peer in all_peers(PLACES, [1, 3, 4])}
    assert scattered["vllm-float32"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "1,3,4"


def test_what_is_missing_is_said_in_the_settings() -> None:
    bare = Places(PLACES.cache, PLACES.repository, PLACES.python, "/models/llama", gguf=None, tcmalloc=None)
    peers = {peer.name: peer for peer in all_peers(bare, [0])}
    assert "openvino-gguf" not in peers
    assert "tcmalloc is not installed" in peers["vllm-float32"].settings["LD_PRELOAD"]
    assert peers["vllm-float32"].environment["LD_PRELOAD"] == "/cache/venvs/vllm/lib/libiomp5.so"


def test_a_cpu_without_the_instructions_is_told_beforehand() -> None:
    assert why_not(PEERS["vllm-float32"], AVX2) is None
    reason = why_not(PEERS["vllm-float32"], frozenset({"sse4_2"}))
    assert reason == "its kernels need avx2, fma, which this CPU does not have"


def test_closed_loops_are_read_or_refused() -> None:
    assert closed_loops("1:4, 8:16") == ((1, 4), (8, 16))
    for text in ("8", "8:4", "0:1", "a:b", "", "1:2:3"):
        with pytest.raises(ConfigError, match="IN_FLIGHT:REQUESTS"):
            closed_loops(text)
