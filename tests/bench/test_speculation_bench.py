"""`python -m bench.speculation`: the same requests to both servers in turn, and equal answers or none."""

from __future__ import annotations

from typing import Any

import pytest

from bench.speculation import __main__ as command
from bench.speculation.texts import chat_body, chat_messages, ids_body
from cluster.errors import BatonError


class Server:
    def __init__(self, name: str, rate: float, offers: list[tuple[str, list[dict[str, Any]]]]) -> None:
        self.name, self.rate, self.offers = name, rate, offers
        self.num_waits, self.ends = 0, True

    def get(self, path: str) -> Any:
        return {"data": [{"id": "m"}]}

    def wait_quiet(self, timeout_s: float) -> bool:
        self.num_waits += 1
        return self.ends


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[dict[str, Any]]]]:
    made: list[tuple[str, list[dict[str, Any]]]] = []

    def offer(server: Server, path: str, bodies: list[dict[str, Any]], in_flight: int) -> Any:
        made.append((server.name, bodies))
        text = "other" if server.name == "wrong" else "same"
        return [text for _ in bodies], server.rate

    monkeypatch.setattr(command, "offer", offer)
    monkeypatch.setattr(command, "counters", lambda server: (10.0 * len(made), 6.0 * len(made)))
    return made


def test_every_request_is_one_of_its_own() -> None:
    for body in (chat_body, ids_body):
        assert len({str(body(index)) for index in range(40)}) == 40
    assert len(chat_messages()) == 16
    assert ids_body(3) == ids_body(3)


def test_both_are_asked_the_same_in_turn(offers: list[tuple[str, list[dict[str, Any]]]]) -> None:
    off, auto = Server("off", 100.0, offers), Server("auto", 150.0, offers)
    row = command.compare(off, auto, "chat", 0.7, 4, 2, 3)  # type: ignore[arg-type]
    assert [name for name, _ in offers] == ["off", "auto", "auto", "off"]
    assert offers[0][1] == offers[1][1]
    assert offers[0][1] != offers[2][1]
    assert [len(bodies) for _, bodies in offers] == [4] * 4
    assert (row["ratio"], row["drafted"], row["right"]) == (1.5, 40, 24)
    assert auto.num_waits == 1  # else drafts of the last steps are missing


def test_a_server_that_does_not_come_to_rest_is_an_error(
    offers: list[tuple[str, list[dict[str, Any]]]],
) -> None:
    off, auto = Server("off", 100.0, offers), Server("auto", 150.0, offers)
    auto.ends = False
    with pytest.raises(BatonError, match="workers were not idle"):
        command.compare(off, auto, "chat", 0.7, 4, 2, 3)  # type: ignore[arg-type]


def test_an_answer_that_differs_is_an_error(offers: list[tuple[str, list[dict[str, Any]]]]) -> None:
    with pytest.raises(BatonError, match="an answer differs with speculation"):
        command.compare(Server("off", 1.0, offers), Server("wrong", 1.0, offers), "ids", 0.0, 1, 1, 1)  # type: ignore[arg-type]
