"""What chat and text replies share: usage, timings, token texts, and the frame around a streamed chunk.

A streamed chunk is bytes put together from parts that are made once per request (`ChunkFrame`); only the
delta text goes through a JSON encoder, so a token costs about a microsecond here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from cluster.detokenizer import TokenSource
from cluster.sampling import FinishReason, PromptScore
from router.delivery import RequestSummary
from router.output import Piece

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
DONE = b"data: [DONE]\n\n"
OBFUSCATION_BYTES = 32  # most tokens are shorter


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the client wants to see beside the text. `num_*logprobs` None = no log-probabilities."""

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None  # in a field of their own
    echo: bool = False
    skip_special_tokens: bool = True  # in the prompt that is echoed
    return_token_ids: bool = False
    timings: bool = False
    include_usage: bool = False  # streams only: a usage chunk at the end
    continuous_usage: bool = False  # streams only: usage in every chunk
    obfuscate: bool = False  # streams only: deltas of one size, against eavesdroppers on encrypted streams

    @property
    def is_plain(self) -> bool:
        """A streamed delta is its text alone."""
        return not (self.keep_entries or self.continuous_usage or self.obfuscate)

    @property
    def keep_entries(self) -> bool:
        return self.num_logprobs is not None or self.return_token_ids


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice before it is written. `lead`: what it repeats before it begins."""

    index: int
    prompt_ids: tuple[int, ...]
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole answer: every piece of one choice put together."""

    plan: ChoicePlan
    whole: Piece
    prompt_scores: tuple[PromptScore, ...] = ()


LARGE_NUM_SCORES = 1000  # log-probabilities; to write more takes milliseconds, which streams would wait for


def num_scores_of(choice: Choice) -> int:
    """Log-probabilities of an answer, alternatives included."""
    entries = choice.whole.entries
    num_alternatives = len(entries[0].output.top_logprobs) if entries else 0
    return len(entries) * (1 + num_alternatives) + num_prompt_scores(choice.prompt_scores)


def num_prompt_scores(scores: Sequence[PromptScore]) -> int:
    return len(scores) * (1 + len(scores[0].best)) if scores else 0


class ReplyFormat(Protocol):
    """The wire format of one reply, chat or text; `finish_reason` of a piece ends the choice."""

    def opening(self, index: int, prompt_scores: Sequence[PromptScore]) -> bytes:
        """What precedes the first delta of a choice (chat's role chunk, an echo), or nothing."""
        ...

    def delta(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """One chunk of a stream; nothing if there is nothing to show yet."""
        ...

    def finish(self, index: int, reason: FinishReason, usage: Usage | None, timings: bytes) -> bytes:
        """The finish chunk of a choice. `timings`: fields that ride in it."""
        ...

    def ending(self, usage: Usage, timings: bytes) -> bytes:
        """Once all choices are finished: the usage chunk if asked for, and `[DONE]`."""
        ...

    def body(self, choices: Sequence[Choice], usage: Usage, summaries: Sequence[RequestSummary]) -> bytes:
        """The whole reply at once."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """The unchanging parts of every chunk of one stream: `head` up to the choice's index."""

    head: bytes
    no_choice: bytes

    @classmethod
    def of(cls, reply_id: str, object_name: str, created: int, model: str) -> ChunkFrame:
        fields = {"id": reply_id, "object": object_name, "created": created, "model": model}
        opened = b"data: " + orjson.dumps(fields)[:-1]
        return cls(opened + b',"choices":[{"index":', opened + b',"choices":[]')

    def choice(self, index: int, fields: bytes, extra: bytes = b"") -> bytes:
        """A chunk with one choice. `extra` starts with a comma or is empty."""
        return b"%b%d,%b}]%b}\n\n" % (self.head, index, fields, extra)

    def around(self, index: int, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands before and after the one field that changes from chunk to chunk."""
        return b"%b%d,%b" % (self.head, index, before), after + b"}]}\n\n"

    def ending(self, options: ReplyOptions, usage: Usage, timings: bytes) -> bytes:
        """The last chunks: usage if asked for, end mark."""
        if not options.include_usage:
            return DONE
        return b"%b%b%b}\n\n" % (self.no_choice, usage_field(usage), timings) + DONE


def obfuscation_field(options: ReplyOptions, num_bytes: int) -> bytes:
    """Random text that makes the `num_bytes` of a chunk which differ from token to token a multiple of
    `OBFUSCATION_BYTES`, as OpenAI's field of that name."""
    if not options.obfuscate:
        return b""
    num_padded = OBFUSCATION_BYTES - num_bytes % OBFUSCATION_BYTES
    return b',"obfuscation":"%b"' % secrets.token_urlsafe(num_padded)[:num_padded].encode()


def usage_field(usage: Usage | None) -> bytes:
    """As a further field of a chunk."""
    return b"" if usage is None else b',"usage":' + orjson.dumps(usage.as_json())


def timings_json(summary: RequestSummary) -> dict[str, Any]:
    """Where the time went, in milliseconds; equal workers mean that the prefill was local."""
    return {
        "queue_ms": _ms(summary.queue_s),
        "prefill_ms": _ms(summary.prefill_s),
        "kv_transfer_ms": _ms(summary.kv_transfer_s),
        "decode_ms": _ms(summary.decode_s),
        "ttft_ms": _ms(summary.ttft_s),
        "attempts": summary.attempts,
        "prefill_worker": summary.prefill_worker,
        "decode_worker": summary.decode_worker,
    }


def timings_field(options: ReplyOptions, summary: RequestSummary) -> bytes:
    return b',"timings":' + orjson.dumps(timings_json(summary)) if options.timings else b""


def add_timings(reply: dict[str, Any], summaries: Sequence[RequestSummary]) -> None:
    """Of a whole reply; with several choices they are in each."""
    if len(summaries) == 1:
        reply["timings"] = timings_json(summaries[0])
        return
    for choice, summary in zip(reply["choices"], summaries, strict=True):
        choice["timings"] = timings_json(summary)


def prompt_logprobs_json(
    tokenizer: TokenSource, prompt_ids: Sequence[int], scores: Sequence[PromptScore]
) -> list[dict[str, Any] | None]:
    """Per token of a prompt its own log-probability and the best ones, by id, each with its rank from 1, as
    vLLM writes it; the first token has none."""
    entries: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(prompt_ids[1:], scores, strict=True):
        known = {token_id: score.logprob, **dict(score.best)}
        ranks = {best_id: rank for rank, (best_id, _) in enumerate(score.best, 1)} | {token_id: score.rank}
        entries.append(
            {
                str(one): {
                    "logprob": finite(value),
                    "rank": ranks[one],
                    "decoded_token": token_text(tokenizer, one),
                }
                for one, value in known.items()
            }
        )
    return entries


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def finite(logprob: float | None) -> float:
    """A log-probability as JSON can hold it."""
    if logprob is None or not logprob > MIN_LOGPROB:  # also NaN
        return MIN_LOGPROB
    return logprob


def token_text(tokenizer: TokenSource, token_id: int) -> str:
    """A token on its own: its text, or its bytes spelled out where they are not whole characters."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
