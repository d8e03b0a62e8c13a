from hypothesis import given
from hypothesis import strategies as st

from bench.load.client.frames import Job
from bench.load.client.offering import Due, Offering

FOREVER = 1e9


def job(
    index: int, scheduled_s: float = 0.0, session: int | None = None, turn: int = 0, think_s: float = 0.0
) -> Job:
    return Job(index, scheduled_s, b"{}", session=session, turn=turn, think_s=think_s)


def take_all(offering: Offering, now_s: float) -> list[tuple[float, int]]:
    taken = []
    while due := offering.take_due(now_s):
        taken.append((due.scheduled_s, due.job.index))
    return taken


def test_open_loop_follows_the_plan_whatever_is_answered() -> None:
    offering = Offering([job(0, 0.0), job(1, 0.5), job(2, 0.5), job(3, 2.0)], None)
    assert offering.next_due_s == 0.0
    assert take_all(offering, 0.1) == [(0.0, 0)]
    assert offering.next_due_s == 0.5
    assert take_all(offering, 0.4) == []
    assert take_all(offering, 1.0) == [(0.5, 1), (0.5, 2)]  # late: the scheduled time stays the plan's
    assert take_all(offering, 2.0) == [(2.0, 3)]
    assert offering.next_due_s is None


def test_closed_loop_sends_when_a_slot_becomes_free() -> None:
    jobs = [job(index) for index in range(4)]
    offering = Offering(jobs, 2)
    assert offering.next_due_s == 0.0
    assert take_all(offering, -0.1) == []
    assert take_all(offering, 0.2) == [(0.2, 0), (0.2, 1)]  # when the client turns to them
    assert offering.next_due_s is None
    assert offering.ended(jobs[1], 3.0, is_ok=False) == []  # a failure frees the slot, too
    assert take_all(offering, FOREVER) == [(3.0, 2)]
    offering.ended(jobs[0], 4.0, is_ok=True)
    assert take_all(offering, FOREVER) == [(4.0, 3)]
    offering.ended(jobs[2], 5.0, is_ok=True)
    assert take_all(offering, FOREVER) == []


def test_a_turn_is_due_after_the_answer_and_the_thinking() -> None:
    turns = [job(0, 1.0, session=7), job(1, 99.0, session=7, turn=1, think_s=0.5), job(2, session=7, turn=2)]
    offering = Offering(turns, None)
    assert take_all(offering, FOREVER) == [(1.0, 0)]
    offering.ended(turns[0], 4.0, is_ok=True)
    assert offering.next_due_s == 4.5
    assert take_all(offering, FOREVER) == [(4.5, 1)]
    offering.ended(turns[1], 6.0, is_ok=True)
    assert take_all(offering, FOREVER) == [(6.0, 2)]


def test_turns_are_in_order_even_where_the_plan_lists_them_otherwise() -> None:
    turns = [job(0, session=1, turn=2), job(1, session=1, turn=1), job(2, session=1, turn=0)]
    offering = Offering(turns, None)
    order = []
    while due := offering.take_due(FOREVER):
        order.append(due.job.turn)
        offering.ended(due.job, 1.0, is_ok=True)
    assert order == [0, 1, 2]


def test_a_failed_turn_ends_its_chat() -> None:
    turns = [job(0, session=1), job(1, session=1, turn=1), job(2, session=1, turn=2)]
    offering = Offering(turns, None)
    take_all(offering, FOREVER)
    assert offering.ended(turns[0], 2.0, is_ok=False) == [Due(2.0, turns[1]), Due(2.0, turns[2])]
    assert offering.next_due_s is None


def test_closed_loop_a_chat_keeps_its_slot_while_it_thinks() -> None:
    chat = [job(0, session=1), job(1, session=1, turn=1, think_s=5.0)]
    other = job(2)
    offering = Offering([*chat, other], 1)
    assert take_all(offering, 0.0) == [(0.0, 0)]
    offering.ended(chat[0], 1.0, is_ok=True)
    assert take_all(offering, 2.0) == []
    assert take_all(offering, FOREVER) == [(6.0, 1)]
    offering.ended(chat[1], 7.0, is_ok=True)
    assert take_all(offering, FOREVER) == [(7.0, 2)]


def test_dropping_gives_up_everything_unsent_once() -> None:
    jobs = [job(0), job(1, session=1), job(2, session=1, turn=1), job(3)]
    offering = Offering(jobs, 2)
    assert take_all(offering, 0.0) == [(0.0, 0), (0.0, 1)]
    assert offering.drop_all(9.0) == [Due(9.0, jobs[3]), Due(9.0, jobs[2])]
    assert offering.drop_all(9.0) == []
    assert offering.ended(jobs[1], 9.0, is_ok=False) == []


def test_slots_that_were_never_opened_are_dropped_too() -> None:
    jobs = [job(0), job(1), job(2)]
    offering = Offering(jobs, 2)
    assert offering.drop_all(1.0) == [Due(1.0, one) for one in jobs]
    assert offering.next_due_s is None


CHAINS = st.lists(st.integers(min_value=1, max_value=4), min_size=1, max_size=8)


@given(CHAINS, st.one_of(st.none(), st.integers(1, 4)), st.randoms(), st.integers(0, 40))
def test_every_request_is_sent_skipped_or_dropped_exactly_once(lengths, slots, random, stop_after) -> None:
    jobs = []
    for session, length in enumerate(lengths):
        for turn in range(length):
            name = None if length == 1 else session
            jobs.append(job(len(jobs), random.random(), session=name, turn=turn, think_s=random.random()))
    offering = Offering(jobs, slots)
    seen: list[int] = []
    in_flight: list[Due] = []
    now_s = 0.0
    for _ in range(stop_after):
        while due := offering.take_due(now_s):
            assert due.scheduled_s <= now_s
            in_flight.append(due)
            seen.append(due.job.index)
        if slots is not None:
            assert len(in_flight) <= slots
        if in_flight:
            ended = in_flight.pop(random.randrange(len(in_flight)))
            seen += [due.job.index for due in offering.ended(ended.job, now_s, random.random() < 0.7)]
        elif offering.next_due_s is None:
            break
        else:
            now_s = max(now_s, offering.next_due_s)
    seen += [due.job.index for due in offering.drop_all(now_s)]
    assert sorted(seen) == [job.index for job in jobs]
