"""Chooses conversations of a file and has their lengths counted: the units of a ShareGPT run.

1. The seed orders the conversations.
2. One after another is taken until there are as many as arrivals: its first `turns` exchanges, outputs as
   long as the recorded answers (or drawn).
3. One that does not fit the model loses its last turns (clamp) or is skipped; a first prompt is never cut,
   since its words are real. Both are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.lengths import Lengths
from bench.load.plan import TraceSource
from bench.load.randomness import generator
from bench.load.settings import Endpoint, Oversize, PlanSettings, ShareGpt
from bench.load.sharegpt import Conversation, read_sharegpt
from bench.load.tokenize_client import TokenizeClient
from bench.load.workloads import Unit, conversation_unit
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConversationUnits:
    units: list[Unit]
    source: TraceSource
    facts: dict[str, Any]


def conversation_units(
    workload: ShareGpt, settings: PlanSettings, num: int, server: TokenizeClient | None
) -> ConversationUnits:
    """`num` units.

    Raises:
        ConfigError: the file has fewer conversations that fit.
        TraceError: the file is not what it should be.
        TokenizeError: the server does not count.
    """
    read = read_sharegpt(Path(workload.path))
    order = generator(settings.seed, "conversations").permutation(len(read.conversations)).tolist()
    outputs = _Outputs(workload.output, settings.seed, server)
    units: list[Unit] = []
    num_skipped = num_cut = 0
    for position in order:
        if len(units) == num:
            break
        conversation = read.conversations[position]
        lengths = outputs.of(position, conversation, workload.turns)
        fitting = _fitting(conversation, lengths, settings, server)
        if fitting == 0:
            num_skipped += 1
            continue
        num_cut += len(lengths) - fitting
        is_chat = settings.endpoint is Endpoint.CHAT
        units.append(
            conversation_unit(conversation, len(units), lengths[:fitting], workload.think_s, is_chat=is_chat)
        )
    if len(units) < num:
        raise ConfigError(
            f"{num} conversations were asked for, but {read.path} has {len(units)} that fit: ask for fewer."
        )
    facts = {
        "num_conversations_file": len(read.conversations) + read.num_empty,
        "num_conversations_empty": read.num_empty,
        "num_conversations_oversize_skipped": num_skipped,
        "num_turns_oversize_cut": num_cut,
    }
    return ConversationUnits(
        units, TraceSource(path=read.path, sha256=read.sha256, format="sharegpt", num_rows=num), facts
    )


class _Outputs:
    """Output lengths of a conversation's turns: drawn, or counted in its answers. A function of seed and
    conversation.
    """

    def __init__(self, lengths: Lengths | None, seed: int, server: TokenizeClient | None) -> None:
        self._lengths = lengths
        self._seed = seed
        self._server = server
        self._bos = 0
        if lengths is None and server is not None:
            self._bos = 2 * server.count_text("time") - server.count_text("time time")

    def of(self, position: int, conversation: Conversation, turns: int) -> list[int]:
        exchanges = conversation.exchanges[:turns]
        if self._lengths is not None:
            drawn: list[int] = self._lengths.draw(
                generator(self._seed, f"outputs/{position}"), len(exchanges)
            ).tolist()
            return drawn
        assert self._server is not None, "check_settings asks for a server"
        return [max(1, self._server.count_text(exchange.answer) - self._bos) for exchange in exchanges]


def _fitting(
    conversation: Conversation, outputs: list[int], settings: PlanSettings, server: TokenizeClient | None
) -> int:
    """How many turns fit, counted with the recorded answers in place of those to come; 0: skip the
    conversation.
    """
    if settings.max_model_len is None or server is None:
        return len(outputs)
    for turn, output_tokens in enumerate(outputs):
        if _prompt_tokens(conversation, turn, settings, server) + output_tokens > settings.max_model_len:
            return turn if settings.oversize is Oversize.CLAMP else 0
    return len(outputs)


def _prompt_tokens(
    conversation: Conversation, turn: int, settings: PlanSettings, server: TokenizeClient
) -> int:
    if settings.endpoint is Endpoint.COMPLETIONS:
        return server.count_text(conversation.exchanges[0].question)
    messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for exchange in conversation.exchanges[:turn]:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    messages.append({"role": "user", "content": conversation.exchanges[turn].question})
    return server.count_messages(messages)
