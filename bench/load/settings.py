"""What a user asks of a load test, as values: everything `build_plan` needs besides a server to count
tokens.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from bench.load.arrivals import check_rate
from bench.load.lengths import Lengths
from bench.load.plan import Arrival
from cluster.errors import ConfigError


class Endpoint(Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Endpoint.COMPLETIONS else "/v1/chat/completions"


class PromptForm(Enum):
    IDS = "ids"  # lists of token ids: exact without asking anyone; completions only
    TEXT = "text"  # words, counted by the server's /tokenize


class Oversize(Enum):
    """What becomes of a request whose prompt and output exceed `max_model_len`; either way it is counted.

    CLAMP: the output is cut to at most half of `max_model_len`, then the prompt loses its end until both
    fit. A chat loses its last turns instead. SKIP: traces and conversations leave the request out; lengths
    that were drawn are an error, because leaving some out would change their distribution.
    """

    SKIP = "skip"
    CLAMP = "clamp"


class Synthetic(msgspec.Struct, frozen=True, kw_only=True, tag="synthetic", tag_field="kind"):
    """Prompts that share nothing. `input` is the whole prompt as the server counts it."""

    input: Lengths
    output: Lengths


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="shared-prefix", tag_field="kind"):
    """Each prompt is the prefix of one of `num_groups` groups, then `input` tokens of its own.

    Group k (from 0) is chosen with a probability proportional to 1 / (k + 1)^`skew` (Zipf; 0: all alike).
    """

    input: Lengths
    output: Lengths
    num_groups: int = 8
    prefix_tokens: int = 512
    skew: float = 0.0


class Chats(msgspec.Struct, frozen=True, kw_only=True, tag="chat", tag_field="kind"):
    """Conversations: arrivals and `num_requests` count conversations, each with `turns` requests.

    `input` is the user's message of each turn, without what the chat template adds. All conversations begin
    with one system message of `system_tokens` (0: none). The next turn follows `think_s` after the answer:
    always so long, or with `random_think` exponentially distributed with that mean.
    """

    turns: Lengths
    input: Lengths
    output: Lengths
    system_tokens: int = 0
    think_s: float = 0.0
    random_think: bool = False


class TraceReplay(msgspec.Struct, frozen=True, kw_only=True, tag="trace", tag_field="kind"):
    """Lengths, and shared prefixes where the trace has them; with trace arrivals its timestamps too.

    `scale` divides all lengths (rounded down, at least 1) and the block size of `hash_ids` with them, so
    prefixes stay shared. The trace is taken from `offset_s` (trace time) on, or with `random_offset` from a
    row that the seed chooses. `speed_up` divides the times between timestamps.
    """

    path: str
    format: str | None = None  # None: detected
    speed_up: float = 1.0
    offset_s: float = 0.0
    random_offset: bool = False
    scale: float = 1.0
    block_tokens: int = 512  # tokens per hash id


class ShareGpt(msgspec.Struct, frozen=True, kw_only=True, tag="sharegpt", tag_field="kind"):
    """Real conversations, in an order that the seed chooses; up to `turns` questions of each.

    `output` None: as long as the recorded answer, by the server's count. Completions offer the first
    question alone.
    """

    path: str
    turns: int = 1
    output: Lengths | None = None
    think_s: float = 0.0


Workload = Synthetic | SharedPrefix | Chats | TraceReplay | ShareGpt


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` and `duration_s` both limit the plan; `seed` decides lengths, order and tokens.

    `salt` changes the tokens only. Runs to be compared on one server use one seed and different salts: the
    same load, and nothing found in a prefix cache that an earlier run filled.
    """

    model: str
    arrival: Arrival
    workload: Workload
    endpoint: Endpoint = Endpoint.COMPLETIONS
    prompt_form: PromptForm | None = None  # None: ids for completions, text for chat
    num_requests: int | None = None
    duration_s: float | None = None
    max_model_len: int | None = None
    oversize: Oversize = Oversize.SKIP
    id_range: tuple[int, int] = (1000, 30_000)  # token ids of `ids` prompts: the first, and one past the last
    seed: int = 0
    salt: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True  # False: the model may stop, so output lengths are upper limits
    extra_body: dict[str, Any] = {}  # goes into every request; wins over the fields above

    @property
    def form(self) -> PromptForm:
        if self.prompt_form is not None:
            return self.prompt_form
        return PromptForm.IDS if self.endpoint is Endpoint.COMPLETIONS else PromptForm.TEXT


def at_rate(settings: PlanSettings, rate: float, seed: int, salt: int) -> PlanSettings:
    """The same load at another mean rate, seed and salt. Timestamps of a trace are sped up to that rate.

    Raises:
        ConfigError: the arrival has no single rate.
    """
    arrival = settings.arrival
    if arrival.kind not in ("poisson", "gamma", "constant", "trace"):
        raise ConfigError(
            f"A search over rates cannot use {arrival.kind} arrivals: use poisson, gamma, constant or trace."
        )
    arrival = msgspec.structs.replace(arrival, rate=check_rate(rate), seed=seed)
    workload = settings.workload
    if isinstance(workload, TraceReplay):
        workload = msgspec.structs.replace(workload, speed_up=1.0)
    return msgspec.structs.replace(settings, arrival=arrival, workload=workload, seed=seed, salt=salt)
