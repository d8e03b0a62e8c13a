"""What a request asks to be promised, from its headers.

    x-slo-ttft-ms     arrival to first token, at most
    x-slo-tpot-ms     mean time per further token, at most
    x-slo-gap-ms      time between any two tokens, at most
    x-slo-class       `interactive` (default) or `batch`: takes what interactive requests leave

A header that is not sent leaves the cluster's own promise. One that cannot be meant is an error that names
it: a promise that is silently not made would be none.
"""

from __future__ import annotations

from typing import Final

from cluster.errors import InvalidRequest
from cluster.request import RequestSlo
from cluster.wire.messages import PriorityClass
from router.asgi import Scope

MOST_MS: Final = 86_400_000.0  # a day
_MOST_DIGITS: Final = 32

_FIELDS: Final = {"x-slo-ttft-ms": "ttft_s", "x-slo-tpot-ms": "tpot_s", "x-slo-gap-ms": "gap_s"}
_CLASS: Final = "x-slo-class"
_PREFIX: Final = b"x-slo-"
_NOTHING: Final = RequestSlo()


def slo_of(scope: Scope) -> RequestSlo:
    """What the headers of an ASGI scope ask for.

    Raises:
        InvalidRequest: an `x-slo-` header that is unknown, sent twice, or has an impossible value.
    """
    sent: dict[str, str] = {}
    for key, value in scope["headers"]:
        if not key.startswith(_PREFIX):
            continue
        name = key.decode("latin-1")
        if name in sent:
            raise InvalidRequest(f"The header `{name}` was sent twice: send it once.", param=name)
        sent[name] = value.decode("latin-1").strip()
    if not sent:
        return _NOTHING
    priority_class = _parse_class(sent.pop(_CLASS, PriorityClass.INTERACTIVE.value))
    seconds: dict[str, float] = {}
    for name, text in sent.items():
        if name not in _FIELDS:
            known = ", ".join(f"`{one}`" for one in (*_FIELDS, _CLASS))
            raise InvalidRequest(f"Unknown header: `{name[:64]}`. There are {known}.", param=name[:64])
        seconds[_FIELDS[name]] = _parse_ms(name, text) / 1e3
    slo = RequestSlo(**seconds, priority_class=priority_class)
    if slo.gap_s is not None and slo.tpot_s is not None and slo.gap_s < slo.tpot_s:
        raise InvalidRequest(
            f"`x-slo-gap-ms` ({sent['x-slo-gap-ms']}) is below `x-slo-tpot-ms` ({sent['x-slo-tpot-ms']}): no "
            "gap can be shorter than the mean that is asked for; raise the one or lower the other.",
            param="x-slo-gap-ms",
        )
    return slo


def _parse_ms(name: str, text: str) -> float:
    plain = text.replace(".", "", 1)
    if plain.isascii() and plain.isdigit() and len(text) <= _MOST_DIGITS:
        value = float(text)
        if 0 < value <= MOST_MS:
            return value
    raise InvalidRequest(
        f"The header `{name}` must be milliseconds, above 0 and at most {MOST_MS:.0f}, such as 250.",
        param=name,
    )


def _parse_class(text: str) -> PriorityClass:
    try:
        return PriorityClass(text)
    except ValueError:
        names = " or ".join(f"`{one.value}`" for one in PriorityClass)
        raise InvalidRequest(f"The header `{_CLASS}` must be {names}.", param=_CLASS) from None
