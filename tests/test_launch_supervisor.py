"""The supervisor: every path of a role's life, and invariants under random events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.launch_events import (
    Action,
    AllReady,
    Become,
    Drain,
    Event,
    Exited,
    Finish,
    Hung,
    Kill,
    Prepared,
    Ready,
    Remain,
    RestartRequested,
    Say,
    ShiftRequested,
    Start,
    StopRequested,
    Tick,
)
from cluster.launch_supervisor import (
    BRIEF_S,
    FORCED_EXIT_CODE,
    HEALTHY_S,
    MAX_BACKOFF_S,
    MAX_RESTARTS,
    PREPARE_S,
    STOP_MARGIN_S,
    WORKER_STOP_S,
    RoleState,
    Supervisor,
)

ROLES = (("router-0", "router"), ("prefill-0", "prefill"), ("decode-0", "decode"))
NAMES = [name for name, _ in ROLES]


@dataclass
class Cluster:
    """A supervisor with a clock, and what its actions have brought about."""

    roles: tuple[tuple[str, str], ...] = ROLES
    now: float = 0.0
    running: dict[str, int] = field(default_factory=dict)  # name → epoch
    started: dict[str, list[int]] = field(default_factory=dict)
    finish: Finish | None = None
    all_ready: int = 0
    said: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)  # as of the latest start
    next_kinds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_kinds = dict(self.roles)
        self.supervisor = Supervisor(self.roles, start_timeout_s=100.0, drain_grace_s=20.0)
        self.apply(self.supervisor.start(self.now))

    def apply(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            assert self.finish is None, "nothing follows Finish"
            match action:
                case Start(name, epoch):
                    assert name not in self.running, f"{name} runs twice"
                    earlier = self.started.setdefault(name, [])
                    assert epoch == len(earlier) + 1, "epochs grow by one"
                    earlier.append(epoch)
                    self.running[name] = epoch
                    self.kinds[name] = self.next_kinds[name]
                case Become(name, kind) | Remain(name, kind):
                    self.next_kinds[name] = kind
                case Kill(name, epoch):
                    if self.running.get(name) == epoch:
                        del self.running[name]
                case Drain(name, epoch):
                    assert self.running[name] == epoch
                case Say(text):
                    self.said.append(text)
                case AllReady():
                    self.all_ready += 1
                case Finish():
                    self.finish = action
        return actions

    def feed(self, event: Event) -> list[Action]:
        if isinstance(event, Exited) and self.running.get(event.role) == event.epoch:
            del self.running[event.role]
        return self.apply(self.supervisor.handle(event, self.now))

    def ready(self, *names: str) -> None:
        for name in names or NAMES:
            self.feed(Ready(name, self.running[name]))

    def die(self, name: str, cause: str = "its process died") -> list[Action]:
        return self.feed(Exited(name, self.running[name], cause))

    def leave(self, name: str) -> list[Action]:
        """Its service ended in order."""
        return self.feed(Exited(name, self.running[name], "it ended by itself", by_itself=True))

    def tick(self) -> list[Action]:
        deadline = self.supervisor.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.feed(Tick())


def test_all_start_at_epoch_one_and_ready_is_told_once() -> None:
    cluster = Cluster()
    assert cluster.running == dict.fromkeys(NAMES, 1)
    cluster.ready()
    assert cluster.all_ready == 1
    cluster.die("decode-0")
    cluster.ready("decode-0")
    assert cluster.all_ready == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_role_that_never_was_ready_ends_the_start_with_its_cause(name: str) -> None:
    cluster = Cluster()
    cluster.die(name, "/m: the weights are truncated")
    assert cluster.finish == Finish(1, f"{name} did not start: /m: the weights are truncated")
    assert cluster.running == {}


def test_a_role_that_is_not_ready_in_time_ends_the_start() -> None:
    cluster = Cluster()
    cluster.ready("router-0", "decode-0")
    cluster.tick()
    assert cluster.now == 100.0
    assert cluster.finish == Finish(1, "prefill-0 did not start: not ready after 100 s")
    assert cluster.running == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_dead_role_is_restarted_at_once_with_the_next_epoch(name: str) -> None:
    cluster = Cluster()
    cluster.ready()
    cluster.now = 5.0
    assert Start(name, 2) in cluster.die(name)
    assert f"{name} died and is restarted as epoch 2: its process died" in cluster.said
    cluster.ready(name)
    assert f"{name} serves again (epoch 2)" in cluster.said


def test_backoff_grows_is_bounded_and_the_role_is_given_up() -> None:
    cluster = Cluster()
    cluster.ready()
    waits = []
    for _ in range(MAX_RESTARTS):
        before = cluster.now
        cluster.die("prefill-0")
        if cluster.supervisor.state("prefill-0") is RoleState.WAITING:
            cluster.tick()
        waits.append(cluster.now - before)
        cluster.ready("prefill-0")
    assert waits[:4] == [0.0, 0.5, 1.0, 2.0]
    assert waits == sorted(waits)
    assert max(waits) <= MAX_BACKOFF_S
    cluster.die("prefill-0", "boom")
    assert cluster.supervisor.state("prefill-0") is RoleState.GIVEN_UP
    assert cluster.finish is None, "decode workers can prefill for themselves"
    assert "given up: boom" in cluster.said[-1]


@pytest.mark.parametrize("name", ["router-0", "decode-0"])
def test_giving_up_what_nothing_can_serve_without_ends_the_cluster(name: str) -> None:
    cluster = Cluster()
    cluster.ready()
    for _ in range(MAX_RESTARTS + 1):
        cluster.die(name, "boom")
        while cluster.finish is None and cluster.supervisor.state(name) is RoleState.WAITING:
            cluster.tick()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1
    assert f"{name} died {MAX_RESTARTS + 1} times in a row and is given up: boom" == cluster.finish.error


def test_a_healthy_minute_forgets_earlier_deaths() -> None:
    cluster = Cluster()
    cluster.ready()
    for _ in range(3 * MAX_RESTARTS):
        cluster.now += HEALTHY_S
        assert any(isinstance(action, Start) for action in cluster.die("decode-0"))
        cluster.ready("decode-0")
    assert cluster.finish is None


def test_a_restart_that_hangs_is_killed_and_tried_again() -> None:
    cluster = Cluster()
    cluster.ready()
    cluster.die("decode-0")
    actions = cluster.tick()
    assert Kill("decode-0", 2) in actions
    cluster.tick()
    assert cluster.running["decode-0"] == 3


def test_events_of_an_earlier_epoch_change_nothing() -> None:
    cluster = Cluster()
    cluster.ready()
    cluster.die("decode-0")
    assert cluster.feed(Exited("decode-0", 1, "late")) == []
    assert cluster.feed(Ready("decode-0", 1)) == []
    assert cluster.supervisor.state("decode-0") is RoleState.STARTING


def test_b132_stop_drains_the_router_then_the_workers() -> None:
    cluster = Cluster()
    cluster.ready()
    assert cluster.feed(StopRequested()) == [Drain("router-0", 1)]
    assert cluster.supervisor.next_deadline() == 20.0 + STOP_MARGIN_S
    assert cluster.die("router-0", "stopped") == [Drain("prefill-0", 1), Drain("decode-0", 1)]
    assert cluster.supervisor.next_deadline() == WORKER_STOP_S
    cluster.die("prefill-0", "stopped")
    assert cluster.finish is None
    cluster.die("decode-0", "stopped")
    assert cluster.finish == Finish(0, None)


def test_b132_whoever_outlives_its_deadline_is_killed_and_the_exit_is_clean() -> None:
    cluster = Cluster()
    cluster.ready()
    cluster.feed(StopRequested())
    assert Kill("router-0", 1) in cluster.tick()
    assert {Kill("prefill-0", 1), Kill("decode-0", 1)} <= set(cluster.tick())
    assert cluster.finish == Finish(0, None)
    assert cluster.running == {}


def test_b132_the_second_signal_kills_at_once() -> None:
    cluster = Cluster()
    cluster.ready()
    cluster.feed(StopRequested())
    cluster.feed(StopRequested())
    assert cluster.finish is not None
    assert cluster.finish.exit_code == FORCED_EXIT_CODE
    assert cluster.running == {}


def test_a_death_while_stopping_is_not_restarted() -> None:
    cluster = Cluster()
    cluster.ready()
    cluster.feed(StopRequested())
    assert not any(isinstance(action, Start) for action in cluster.die("decode-0"))
    cluster.die("router-0")
    cluster.die("prefill-0")
    assert cluster.finish == Finish(0, None)


def test_a_role_waiting_for_its_restart_does_not_hold_up_a_stop() -> None:
    cluster = Cluster((("router-0", "router"), ("decode-0", "decode")))
    cluster.ready("router-0", "decode-0")
    cluster.die("decode-0")
    cluster.ready("decode-0")
    cluster.die("decode-0")
    assert cluster.supervisor.state("decode-0") is RoleState.WAITING
    cluster.feed(StopRequested())
    cluster.die("router-0")
    assert cluster.finish == Finish(0, None)


def test_a_hung_role_is_killed_and_restarted() -> None:
    cluster = Cluster()
    cluster.ready()
    actions = cluster.feed(Hung("prefill-0", 1))
    assert actions[0] == Kill("prefill-0", 1)
    assert Start("prefill-0", 2) in actions
    assert cluster.feed(Hung("prefill-0", 1)) == [], "of the epoch before"
    assert cluster.feed(Exited("prefill-0", 1, "its process died")) == []


def test_a_role_that_left_in_order_is_restarted_and_that_is_no_failure() -> None:
    """SIGTERM to a worker: it drains and its next epoch starts, however often."""
    cluster = Cluster()
    for _ in range(3 * MAX_RESTARTS):
        cluster.ready(*cluster.running)
        cluster.now += BRIEF_S
        assert any(isinstance(action, Start) for action in cluster.leave("decode-0"))
    assert cluster.finish is None


def test_a_role_that_ends_as_soon_as_it_serves_is_not_restarted_for_ever() -> None:
    cluster = Cluster()
    cluster.ready()
    while cluster.finish is None:
        if cluster.supervisor.state("decode-0") is RoleState.WAITING:
            cluster.tick()
        cluster.ready("decode-0")
        cluster.leave("decode-0")
    assert "given up" in str(cluster.finish.error)


FOUR = (
    ("router-0", "router"),
    ("prefill-0", "prefill"),
    ("decode-0", "decode"),
    ("decode-1", "decode"),
)


def test_a_rolling_restart_replaces_one_worker_at_a_time() -> None:
    cluster = Cluster(FOUR)
    cluster.ready(*cluster.running)
    assert Drain("prefill-0", 1) in cluster.feed(RestartRequested())
    assert cluster.feed(RestartRequested()) == [Say("a rolling restart is under way already")]
    for name, following in (("prefill-0", "decode-0"), ("decode-0", "decode-1"), ("decode-1", None)):
        assert cluster.leave(name) == [Start(name, 2)]
        assert len(cluster.running) == 4
        cluster.ready(name)
        if following is not None:
            assert cluster.supervisor.state(following) is RoleState.RESTARTING
    assert cluster.said[-1] == "rolling restart done"
    assert cluster.running == {"router-0": 1, "prefill-0": 2, "decode-0": 2, "decode-1": 2}
    cluster.feed(RestartRequested())
    assert cluster.supervisor.state("prefill-0") is RoleState.RESTARTING


def test_a_rolling_restart_waits_for_a_worker_that_died_meanwhile() -> None:
    cluster = Cluster(FOUR)
    cluster.ready(*cluster.running)
    cluster.feed(RestartRequested())
    cluster.die("decode-1")
    cluster.leave("prefill-0")
    cluster.ready("prefill-0")
    assert cluster.supervisor.state("decode-0") is RoleState.READY, "decode-1 is not back"
    cluster.ready("decode-1")
    assert cluster.supervisor.state("decode-0") is RoleState.RESTARTING


def test_a_worker_that_does_not_drain_in_time_is_killed_and_the_restart_goes_on() -> None:
    cluster = Cluster(FOUR)
    cluster.ready(*cluster.running)
    cluster.feed(RestartRequested())
    actions = cluster.tick()
    assert cluster.now == 20.0 + STOP_MARGIN_S
    assert actions[1:] == [Kill("prefill-0", 1), Start("prefill-0", 2)]
    cluster.feed(Hung("prefill-0", 1))
    cluster.ready("prefill-0")
    assert Kill("decode-0", 1) in cluster.feed(Hung("decode-0", 1))
    assert cluster.running["decode-0"] == 2


def test_no_rolling_restart_before_all_serve_or_while_stopping() -> None:
    cluster = Cluster()
    cluster.ready("router-0", "decode-0")
    assert cluster.feed(RestartRequested()) == [Say("nothing is restarted: not every role has served yet")]
    cluster.ready("prefill-0")
    cluster.feed(StopRequested())
    assert cluster.feed(RestartRequested()) == []


def test_a_stop_in_the_middle_of_a_rolling_restart_ends_it() -> None:
    cluster = Cluster(FOUR)
    cluster.ready(*cluster.running)
    cluster.feed(RestartRequested())
    cluster.feed(StopRequested())
    for name in ("router-0", "prefill-0", "decode-0", "decode-1"):
        assert not any(isinstance(action, Start) for action in cluster.leave(name))
    assert cluster.finish == Finish(0, None)


POOL = (*ROLES, ("decode-1", "decode"))
STEPS = ("ready", "die", "leave", "hang", "tick", "stop", "restart", "stale", "sleep", "shift", "prepared")


def pool() -> Cluster:
    cluster = Cluster(POOL)
    cluster.ready(*(name for name, _ in POOL))
    return cluster


def shift(cluster: Cluster, name: str, kind: str) -> list[Action]:
    """Ask for it; what its drain is begun with, once its next process is up."""
    cluster.feed(ShiftRequested(name, kind))
    return cluster.feed(Prepared(name))


def test_a_shifted_worker_serves_until_its_next_process_is_up_which_has_the_other_role() -> None:
    cluster = pool()
    assert cluster.feed(ShiftRequested("decode-1", "prefill"))[1:] == [Become("decode-1", "prefill")]
    assert cluster.feed(Prepared("decode-1")) == [Drain("decode-1", 1)]
    assert cluster.feed(Prepared("decode-1")) == []
    assert cluster.leave("decode-1") == [Start("decode-1", 2)]
    cluster.ready("decode-1")
    assert cluster.kinds["decode-1"] == "prefill"
    assert "decode-1 serves as a prefill worker (epoch 2)" in cluster.said
    cluster.die("decode-1")
    cluster.ready("decode-1")
    assert cluster.kinds["decode-1"] == "prefill", "it has that role for good"
    assert shift(cluster, "decode-1", "decode") == [Drain("decode-1", 3)]


def test_where_the_next_process_has_no_place_beside_it_a_worker_drains_first() -> None:
    cluster = pool()
    cluster.feed(ShiftRequested("decode-1", "prefill"))
    assert cluster.tick() == [Drain("decode-1", 1)]
    assert cluster.now == PREPARE_S
    assert cluster.leave("decode-1") == [Start("decode-1", 2)]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_one_that_ends_before_it_drains_comes_back_in_its_new_role(how: str) -> None:
    cluster = pool()
    cluster.feed(ShiftRequested("decode-1", "prefill"))
    actions = cluster.die("decode-1") if how == "dies" else cluster.feed(Hung("decode-1", 1))
    assert actions[-1] == Start("decode-1", 2)
    assert cluster.kinds["decode-1"] == "prefill"


def test_the_last_decode_worker_keeps_its_role_and_shifts_come_one_at_a_time() -> None:
    last = [Say("decode-1 stays a decode worker: it is the last")]
    cluster = pool()
    for name, kind in (("router-0", "decode"), ("nobody", "decode"), ("decode-0", "decode")):
        assert cluster.feed(ShiftRequested(name, kind)) == []
    cluster.feed(ShiftRequested("decode-0", "prefill"))
    stays = [Say("decode-1 stays a decode worker: not everybody serves")]
    assert cluster.feed(ShiftRequested("decode-1", "prefill")) == stays
    cluster.feed(Prepared("decode-0"))
    assert cluster.feed(ShiftRequested("decode-1", "prefill")) == stays
    cluster.leave("decode-0")
    assert cluster.feed(ShiftRequested("decode-1", "prefill")) == stays
    cluster.ready("decode-0")
    assert cluster.feed(ShiftRequested("decode-1", "prefill")) == last


@pytest.mark.parametrize("how", ["dies", "not ready in time"])
def test_a_worker_that_does_not_come_up_in_its_new_role_goes_back(how: str) -> None:
    cluster = pool()
    shift(cluster, "prefill-0", "decode")
    cluster.leave("prefill-0")
    if how == "dies":
        cluster.die("prefill-0", "KV memory is too small")
    else:
        cluster.tick()
    assert cluster.running["prefill-0"] == 3
    cluster.feed(Prepared("prefill-0"))
    cluster.ready("prefill-0")
    assert cluster.kinds["prefill-0"] == "prefill"
    text = "prefill-0 cannot be a decode worker, and is a prefill worker again"
    assert any(said.startswith(text) for said in cluster.said)


def test_a_worker_whose_next_process_cannot_be_keeps_its_role_and_serves_on() -> None:
    cluster = pool()
    cluster.feed(ShiftRequested("decode-1", "prefill"))
    assert cluster.feed(Prepared("decode-1", "no memory"))[1:] == [Remain("decode-1", "decode")]
    assert cluster.said[-1] == "decode-1 cannot become a prefill worker: no memory"
    assert cluster.running["decode-1"] == 1
    assert cluster.supervisor.next_deadline() is None
    assert shift(cluster, "decode-1", "prefill") == [Drain("decode-1", 1)], "it may be asked for again"


@pytest.mark.parametrize("how", ["prepared", "tick"])
def test_a_worker_that_has_become_the_last_to_decode_keeps_its_role(how: str) -> None:
    cluster = pool()
    cluster.feed(ShiftRequested("decode-1", "prefill"))
    cluster.die("decode-0")
    actions = cluster.feed(Prepared("decode-1")) if how == "prepared" else cluster.tick()
    assert actions[1:] == [Remain("decode-1", "decode")]
    assert cluster.said[-1].endswith("it is the last decode worker now")
    cluster.ready("decode-0")
    assert shift(cluster, "decode-1", "prefill") == [Drain("decode-1", 1)]


def test_a_stop_ends_a_shift_that_had_not_begun_to_drain() -> None:
    cluster = pool()
    cluster.feed(ShiftRequested("decode-1", "prefill"))
    assert cluster.feed(StopRequested())[0] == Remain("decode-1", "decode")
    assert cluster.feed(Prepared("decode-1")) == []
    assert cluster.running["decode-1"] == 1, "it drains with the others, after the router"


def test_a_worker_that_does_not_drain_in_time_is_killed_and_shifts() -> None:
    cluster = pool()
    shift(cluster, "decode-0", "prefill")
    assert cluster.tick()[1:] == [Kill("decode-0", 1), Start("decode-0", 2)]
    assert cluster.kinds["decode-0"] == "prefill"


def test_no_shift_in_the_middle_of_a_rolling_restart_or_a_stop() -> None:
    cluster = pool()
    cluster.feed(RestartRequested())
    told = cluster.feed(ShiftRequested("decode-1", "prefill"))
    assert told == [Say("decode-1 stays a decode worker: not everybody serves")]
    cluster = pool()
    cluster.feed(StopRequested())
    assert cluster.feed(ShiftRequested("decode-1", "prefill")) == []


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(STEPS),
            st.sampled_from([name for name, _ in POOL]),
        )
    )
)
def test_whatever_happens_nothing_runs_twice_and_the_end_is_an_end(steps: list[tuple[str, str]]) -> None:
    """`Cluster` checks on the way: epochs grow by one, at most one life per role, nothing after Finish. Roles
    change, and there is always one that may decode."""
    cluster = Cluster(POOL)
    for step, name in steps:
        match step:
            case "ready" if name in cluster.running:
                cluster.ready(name)
            case "die" if name in cluster.running:
                cluster.die(name)
            case "leave" if name in cluster.running:
                cluster.leave(name)
            case "hang" if name in cluster.running:
                cluster.feed(Hung(name, cluster.running[name]))
            case "restart":
                cluster.feed(RestartRequested())
            case "shift":
                kind = "prefill" if cluster.kinds[name] == "decode" else "decode"
                cluster.feed(ShiftRequested(name, kind))
            case "prepared":
                cluster.feed(Prepared(name))
            case "tick" if cluster.supervisor.next_deadline() is not None:
                cluster.tick()
            case "stop":
                cluster.feed(StopRequested())
            case "stale":
                cluster.feed(Exited(name, 0, "stale"))
            case "sleep":
                cluster.now += 61.0
        assert "decode" in cluster.next_kinds.values()
    if cluster.finish is not None:
        assert cluster.running == {}
        assert cluster.supervisor.next_deadline() is None
        return
    cluster.feed(StopRequested())  # from any state a stop comes to its end by itself
    for _ in range(2 * len(POOL)):
        if cluster.finish is None:
            cluster.tick()
    assert cluster.finish is not None
    assert cluster.running == {}
