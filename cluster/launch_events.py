"""What the launcher's decisions hear and what they answer: the seam between `cluster.launch_supervisor`,
which decides, and `cluster.launch_driver`, which does it."""

from __future__ import annotations

from dataclasses import dataclass

# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    role: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The role's process is gone or its service returned. `cause` is one sentence; `by_itself`: the service
    ended in order, as it does when its process is asked to."""

    role: str
    epoch: int
    cause: str
    by_itself: bool = False


@dataclass(frozen=True, slots=True)
class Hung:
    """The role's process lives and gives no sign of life."""

    role: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """All workers are to be replaced, one after the other."""


@dataclass(frozen=True, slots=True)
class ShiftRequested:
    """A worker is to have the other role: "prefill" | "decode"."""

    role: str
    kind: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The process of the role's next start is up, or cannot be for a `cause`."""

    role: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal: the first drains, the second kills."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline()` passed."""


Event = Ready | Exited | Hung | RestartRequested | ShiftRequested | Prepared | StopRequested | Tick


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    role: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Become:
    """From its next start on the worker is of this kind; its process is placed now."""

    role: str
    kind: str


@dataclass(frozen=True, slots=True)
class Remain:
    """The worker stays of this kind after all; the process placed for its next start ends."""

    role: str
    kind: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask the role to finish what runs and end."""

    role: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Kill:
    role: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Say:
    """Something a person should know."""

    text: str


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every role is ready, for the first time."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing runs any more (what had to be killed is in earlier actions)."""

    exit_code: int
    error: str | None


Action = Start | Become | Remain | Drain | Kill | Say | AllReady | Finish
