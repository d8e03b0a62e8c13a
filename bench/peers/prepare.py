"""Makes a peer ready: environment, packages, model. Each step once; a second run starts at once.

1. `pending` says which steps have no stamp.
2. Each is run with a deadline, its output in a log file; a stamp in the step's home remembers success.
3. A step that fails is one sentence with its last line of output: the peer's row tells it, others go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.peers.peer import Peer, Places, Step
from cluster.errors import BatonError

_STAMPS = ".peer-steps"
_VERSIONS_PROGRAM = (
    "import importlib.metadata as m, json, platform, sys;"
    "print(json.dumps({'python': platform.python_version()} | {n: m.version(n) for n in sys.argv[1:]}))"
)
_VERSIONS_TIMEOUT_S = 60


class CannotRun(BatonError):
    """A peer cannot be made ready or started here; the message is the reason its row gives."""


def stamp_of(step: Step) -> Path:
    """The file that says this very command has succeeded."""
    text = json.dumps([step.argv, step.environment])
    return step.home / _STAMPS / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def pending(peer: Peer) -> list[Step]:
    return [step for step in peer.steps if not stamp_of(step).is_file()]


def prepare(peer: Peer, places: Places, tell: Callable[[str], None]) -> None:
    """Run what is pending. `tell` gets one line per step.

    Raises:
        CannotRun: a step failed.
    """
    _link_imports(places)
    for step in pending(peer):
        tell(f"{peer.name}: {step.title}")
        log = places.logs / f"prepare-{peer.name}.log"
        _run(step, log)
        stamp = stamp_of(step)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(step.title + "\n")


def _run(step: Step, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    step.home.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | dict(step.environment)
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(step.argv)}\n".encode())
        output.flush()
        try:
            done = subprocess.run(
                step.argv,
                env=environment,
                cwd=step.home.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=step.timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotRun(f"to {step.title} took over {step.timeout_s:.0f} s; see {log}") from error
        except OSError as error:
            raise CannotRun(f"cannot {step.title}: {error}") from error
    if done.returncode != 0:
        raise CannotRun(f"cannot {step.title}: it {ending(done.returncode)}: {last_line(log)}; see {log}")


def ending(status: int) -> str:
    """How a process ended, in words: a CPU that lacks an instruction shows as SIGILL."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"died of {name}" + (" (this CPU lacks an instruction it needs)" if name == "SIGILL" else "")


def last_line(log: Path) -> str:
    """The last line that is not blank, cut to a readable length."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "no output")


def versions(peer: Peer) -> dict[str, str]:
    """Versions of the interpreter and of the peer's distributions, asked from its own environment.

    Raises:
        CannotRun: the environment does not answer.
    """
    if peer.python is None:
        return {}
    command = [peer.python, "-c", _VERSIONS_PROGRAM, *peer.distributions]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSIONS_TIMEOUT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CannotRun(f"cannot ask {peer.python} for versions: {error}") from error
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CannotRun(f"cannot ask {peer.python} for versions: {message}")
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _link_imports(places: Places) -> None:
    """`imports/bench` leads to this package, whichever checkout it is run from."""
    places.imports.mkdir(parents=True, exist_ok=True)
    link, target = places.imports / "bench", places.repository / "bench"
    if link.is_symlink() and link.readlink() == target:
        return
    temporary = places.imports / f".bench-{os.getpid()}"
    temporary.symlink_to(target)
    temporary.rename(link)
