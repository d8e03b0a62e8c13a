"""One streamed answer as its client sees it: the text, and where its time went. Pure.

`take` gets every chunk with the time at which it came; `timing_lines` says what that amounts to. What the
client measured comes first, what the server measured inside second, if it was asked to tell (`timings:
true`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.readable import duration, plural


@dataclass(slots=True)
class Answer:
    """Times are of one clock, in seconds."""

    sent_at: float
    text: str = ""
    first_at: float | None = None
    last_at: float | None = None
    num_pieces: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any], now: float) -> str:
        """The chunk's text, "" if it has none."""
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        choices: Sequence[dict[str, Any]] = chunk.get("choices") or ({},)
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        piece = choices[0].get("delta", {}).get("content") or ""
        if piece:
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
            self.num_pieces += 1
            self.text += piece
        return piece

    @property
    def num_tokens(self) -> int:
        """As the server counted; without that, the pieces that came."""
        return self.usage["completion_tokens"] if self.usage else self.num_pieces

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - 1)

    def timing_lines(self) -> list[str]:
        """One line of the client's measurements and one of the server's, as far as there are any."""
        if self.first_at is None or self.last_at is None:
            return []
        parts = [f"first token {duration(self.ttft_s)}"]
        if self.tpot_s:
            parts.append(f"{duration(self.tpot_s)} per token ({1 / self.tpot_s:.0f}/s)")
        parts.append(f"{plural(self.num_tokens, 'token')} in {duration(self.last_at - self.sent_at)}")
        if self.finish_reason == "length":
            parts.append("cut short: it reached its longest length (`--max-tokens`, or the model's)")
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"prompt {self.usage['prompt_tokens']}" + (f", {cached} cached" if cached else ""))
        lines = [" · ".join(parts)]
        if self.timings:
            lines.append(" · ".join(_stages(self.timings)))
        return lines


def _stages(timings: dict[str, Any]) -> list[str]:
    is_local = timings["prefill_worker"] == timings["decode_worker"]
    stages = [
        f"queue {duration(timings['queue_ms'] / 1000)}",
        f"prefill {duration(timings['prefill_ms'] / 1000)} on {timings['prefill_worker']}",
        f"transfer {duration(timings['kv_transfer_ms'] / 1000)}",
        f"decode {duration(timings['decode_ms'] / 1000)} on {timings['decode_worker']}",
    ]
    if is_local:
        del stages[2]
    if timings["attempts"] > 1:
        stages.append(f"{timings['attempts']} attempts")
    return stages
