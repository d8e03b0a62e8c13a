"""Beam search in a real cluster: its answers are those of a search that asks for one token at a time, also
when the worker that computes the beams is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from router.beam_search import BeamRules
from tests.router.test_beam_search import simple_search
from tests.support.byte_tokenizer import ADDED, EOS, SPECIALS
from tests.support.local_cluster import LocalCluster, local_cluster
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(120)]

PROMPT = tuple(b"What is the most probable answer of all?")
POOLS = {"prefill_kv_bytes": 16 << 20, "decode_kv_bytes": 16 << 20, "recovery_wait_s": 60.0}
_IDS = {text: token_id for token_id, text in (SPECIALS | ADDED).items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with local_cluster(model, prefill=1, decode=2, **POOLS) as running:
        yield running


def token_id(name: str) -> int:
    """Of a token as log-probabilities name it."""
    if name in _IDS:
        return _IDS[name]
    return int(name[-2:], 16) if name.startswith("bytes:") else ord(name)


class OneByOne:
    """The model by requests for one token each, which know nothing of beams."""

    def __init__(self, cluster: LocalCluster, width: int) -> None:
        self._cluster = cluster
        self._num_logprobs = 2 * width
        self._known: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def __call__(self, prefix: tuple[int, ...]) -> list[tuple[int, float]]:
        if prefix not in self._known:
            fields = {"max_tokens": 1, "temperature": 0, "logprobs": self._num_logprobs, "ignore_eos": True}
            body = self._cluster.complete(prompt=[*PROMPT, *prefix], **fields)
            (best,) = body["choices"][0]["logprobs"]["top_logprobs"]
            self._known[prefix] = [(token_id(name), logprob) for name, logprob in best.items()]
        return self._known[prefix]


def search(cluster: LocalCluster, width: int, max_tokens: int, **fields: Any) -> list[tuple[Any, ...]]:
    body = cluster.complete(
        prompt=list(PROMPT),
        use_beam_search=True,
        n=width,
        max_tokens=max_tokens,
        logprobs=0,
        return_token_ids=True,
        **fields,
    )
    return [
        (tuple(choice["token_ids"]), choice["finish_reason"], tuple(choice["logprobs"]["token_logprobs"]))
        for choice in body["choices"]
    ]


@pytest.mark.parametrize(
    ("width", "fields"), [(2, {}), (4, {"length_penalty": 0.0}), (3, {"ignore_eos": True})]
)
def test_equal_to_a_search_by_single_tokens(
    cluster: LocalCluster, width: int, fields: dict[str, Any]
) -> None:
    rules = BeamRules(
        width=width,
        max_tokens=24,
        end_ids=frozenset() if "ignore_eos" in fields else frozenset({EOS}),
        length_penalty=fields.get("length_penalty", 1.0),
    )
    model = OneByOne(cluster, width)
    expected = [
        (path, reason.value, tuple(dict(model(path[:at]))[token] for at, token in enumerate(path)))
        for path, reason, _ in simple_search(model, rules)
    ]
    assert search(cluster, width, 24, **fields) == expected
    cluster.wait_quiet()


def test_the_worker_that_computes_the_beams_is_killed(cluster: LocalCluster) -> None:
    settings: dict[str, Any] = {"width": 4, "max_tokens": 160, "ignore_eos": True}
    expected = search(cluster, **settings)
    found: list[Any] = []
    has_died = threading.Event()

    def ask() -> None:
        """One search after the other, for one may end before anybody sees that it runs."""
        while not has_died.is_set():
            found.append(None)
            found[-1] = search(cluster, **settings)

    asking = threading.Thread(target=ask)
    asking.start()

    def busy() -> list[str]:
        return [name for name in ("decode-0", "decode-1") if cluster.worker(name).get("running")]

    try:
        cluster.wait_for(lambda: bool(busy()), 20, "a beam")
        victim = busy()[0]
        cluster.kill(victim)
    finally:
        has_died.set()
        asking.join(60)
    assert found
    assert all(one == expected for one in found)
    cluster.restart(victim)
    cluster.wait_quiet()
