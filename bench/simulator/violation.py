"""What the simulator raises when a rule of the protocol is broken."""

from __future__ import annotations

from typing import Final

RULES: Final = {
    "I1": "a block is writable by at most one attempt",
    "I2": "no block is freed or reused while something can still touch it",
    "I3": "every lease ends in time, and no wanted one expires",
    "I4": "the client sees each token index exactly once, in order",
    "I5": "no token is computed from KV whose pieces are incomplete",
    "I6": "granted is at most the capacity",
    "I7": "P's blocks live until D has them or the attempt ended",
    "I8": "the tokens equal those of the undisturbed run",
    "end": "each request ends once, in time, with its tokens or an error that the rules allow",
    "quiet": "nothing is left when all requests have ended",
    "limits": "no tenant gets more than its limits allow, through all routers together",
    "lost": "a request is never left with a worker that is gone",
    "index": "what a router believes cached is what the worker has",
    "core": "no decision fails",
}


class Violation(Exception):
    """`rule` is a key of `RULES`."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule} ({RULES[rule]}): {detail}")
        self.rule = rule
        self.detail = detail
