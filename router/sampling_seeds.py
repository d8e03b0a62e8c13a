"""Seeds of several answers to one prompt: different ones, and the same ones again for the same request."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from cluster.sampling import SamplingParams


def seed_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`. The first keeps the request's seed, so that it is what a request for
    one answer gets; only it reports on the prompt."""
    if index == 0:
        return sampling
    digest = blake2b(f"{sampling.seed}/{index}".encode(), digest_size=8, person=b"baton-choice").digest()
    seed = int.from_bytes(digest, "little") >> 1  # a non-negative int64
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)
