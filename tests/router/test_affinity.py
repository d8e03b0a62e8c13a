"""Requests of one session meet where the last one was, if that costs nothing and no prefix says more."""

from __future__ import annotations

import msgspec

from cluster.ids import WorkerId
from router.affinity import Affinity, Near
from tests.router.conductor_peers import World, make_spec
from tests.router.view_peers import Book, ask, hashes


def near(prefill: str, decode: str) -> Near:
    return Near(WorkerId(prefill), WorkerId(decode))


def test_the_latest_sessions_are_kept_each_its_tenants_own() -> None:
    sessions = Affinity(most=2)
    sessions.note("a", "chat", near("p0", "d0"))
    sessions.note("b", "chat", near("p1", "d1"))
    assert sessions.of("a", "chat") == near("p0", "d0")
    sessions.note("a", "chat", near("p2", "d2"))
    sessions.note("c", "chat", near("p3", "d3"))
    assert (sessions.of("a", "chat"), sessions.of("b", "chat")) == (near("p2", "d2"), None)
    sessions.note("a", "", near("p0", "d0"))
    assert (len(sessions), sessions.of("a", "")) == (2, None)


def test_of_equal_workers_it_is_the_sessions_last() -> None:
    book = Book("d0", "d1", "d2")
    assert book.placed(msgspec.structs.replace(ask(50), near=near("d2", "d2"))) == (None, "d2")
    assert book.placed(msgspec.structs.replace(ask(50), near=near("gone", "gone")))[1] in ("d0", "d1")


def test_a_busier_worker_is_not_taken_for_it() -> None:
    book = Book("d0", "d1")
    book.beat("d1", on_time_prefill_s=1.0)
    assert book.placed(msgspec.structs.replace(ask(50), near=near("d1", "d1"))) == (None, "d0")


def test_a_known_prefix_says_more() -> None:
    book = Book("d0", "d1")
    book.cached("d0", hashes(400))
    assert book.placed(msgspec.structs.replace(ask(400), near=near("d1", "d1"))) == (None, "d0")


def test_the_conductor_remembers_where_a_session_was() -> None:
    world = World()
    for name in ("d0", "d1", "d2"):
        world.decode(name)
    workers = set()
    for index in range(4):
        spec = msgspec.structs.replace(make_spec(f"r{index}", num_prompt=3), affinity="chat")
        client = world.submit(spec)
        world.run()
        world.assert_served(client)
        workers.add(world.conductor._placing._affinity.of(spec.tenant, "chat"))
    assert len(workers) == 1
