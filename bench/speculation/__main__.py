"""`python -m bench.speculation`: output tokens per second with and without speculation, by kind of text.

1. Two servers, one with `--speculation off`, on the same cores; the one that is not asked rests.
2. For each number of requests in flight the same requests go to both in turn, `--rounds` times, who is first
   changing each time. Answers must be equal, or the command fails.
3. A row: tokens per second of each, the median of the rounds' ratios, and how many drafts were right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.served import ServedCluster
from bench.speculation.texts import chat_body, ids_body
from cluster.errors import BatonError

OUTPUT_TOKENS: Final = 128
QUIET_TIMEOUT_S: Final = 20.0
KINDS: Final[dict[str, tuple[str, Callable[[int], dict[str, Any]]]]] = {
    "chat": ("/v1/chat/completions", chat_body),
    "ids": ("/v1/completions", ids_body),
}
_DRAFTS, _RIGHT = "baton_spec_decode_num_draft_tokens_total", "baton_spec_decode_num_accepted_tokens_total"


def ask(server: ServedCluster, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """The answer's text and its tokens."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, answer["usage"]["completion_tokens"]


def offer(
    server: ServedCluster, path: str, bodies: list[dict[str, Any]], in_flight: int
) -> tuple[list[str], float]:
    """The answers, and output tokens per second."""
    with ThreadPoolExecutor(in_flight) as pool:
        start = time.perf_counter()
        answers = list(pool.map(lambda body: ask(server, path, body), bodies))
        seconds = time.perf_counter() - start
    return [text for text, _ in answers], sum(count for _, count in answers) / seconds


def counters(server: ServedCluster) -> tuple[float, float]:
    """Drafts, and those that were right."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith((_DRAFTS, _RIGHT)))
    return float(found[_DRAFTS]), float(found[_RIGHT])


def compare(
    off: ServedCluster,
    auto: ServedCluster,
    kind: str,
    temperature: float,
    in_flight: int,
    rounds: int,
    count: int,
) -> dict[str, Any]:
    """
    Raises:
        BatonError: an answer differs.
    """
    path, body = KINDS[kind]
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    before = counters(auto)
    num_requests = max(count, in_flight)
    for number in range(rounds):
        bodies = [
            {"model": "", "max_tokens": OUTPUT_TOKENS, "temperature": temperature, "seed": index}
            | body(index)
            for index in range(number * num_requests, (number + 1) * num_requests)
        ]
        names = ("off", "auto") if number % 2 == 0 else ("auto", "off")
        texts = {}
        for name in names:
            server = off if name == "off" else auto
            for one in bodies:
                one["model"] = server.get("/v1/models")["data"][0]["id"]
            texts[name], rate = offer(server, path, bodies, in_flight)
            rates[name].append(rate)
        if texts["off"] != texts["auto"]:
            raise BatonError(f"{kind}, {in_flight} in flight: an answer differs with speculation")
    if not auto.wait_quiet(QUIET_TIMEOUT_S):
        raise BatonError(f"workers were not idle {QUIET_TIMEOUT_S:.0f} s after the last answer")
    drafted, right = (after - was for after, was in zip(counters(auto), before, strict=True))
    ratios = [auto_rate / off_rate for off_rate, auto_rate in zip(rates["off"], rates["auto"], strict=True)]
    return {
        "kind": kind,
        "temperature": temperature,
        "in_flight": in_flight,
        "off_tokens_per_s": round(statistics.median(rates["off"]), 1),
        "auto_tokens_per_s": round(statistics.median(rates["auto"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "drafted": round(drafted),
        "right": round(right),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=[*KINDS], default="chat")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16, help="per round, or as many as are in flight")
    parser.add_argument("--output", type=Path, help="append the rows: JSON lines")
    parser.add_argument("serve", nargs="*", help="options of both servers, after --")
    given = parser.parse_args()
    with ExitStack() as servers:
        off, auto = (
            servers.enter_context(
                ServedCluster(["--launcher", "local", "--speculation", speculation, *given.serve])
            )
            for speculation in ("off", "auto")
        )
        for server in (off, auto):
            offer(server, *_warm_up(server))
        for in_flight in given.in_flight:
            row = compare(off, auto, given.kind, given.temperature, in_flight, given.rounds, given.requests)
            row["serve"] = " ".join(given.serve)
            print(
                f"{given.kind} T={given.temperature:g} {row['serve']} {in_flight:>3} in flight: "
                f"{row['off_tokens_per_s']:>7} -> {row['auto_tokens_per_s']:>7} tok/s, "
                f"x{row['ratio']:.2f} {row['ratios']}, {row['right']} of {row['drafted']} drafts right",
                flush=True,
            )
            if given.output is not None:
                with given.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def _warm_up(server: ServedCluster) -> tuple[str, list[dict[str, Any]], int]:
    model = server.get("/v1/models")["data"][0]["id"]
    return "/v1/completions", [ids_body(9999) | {"model": model, "max_tokens": 16}], 1


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        sys.exit(str(error))
