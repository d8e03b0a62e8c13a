import os
import signal
import sys
from pathlib import Path

import pytest

from bench.peers.peer import Peer, Places, Step
from bench.peers.prepare import CannotRun, ending, pending, prepare, versions

REPOSITORY = Path(__file__).resolve().parents[3]


def places(tmp_path: Path) -> Places:
    return Places(tmp_path, REPOSITORY, sys.executable, "demo", gguf=None, tcmalloc=None)


def peer(*steps: Step, **extra: object) -> Peer:
    fields = {
        "title": "A peer",
        "precision": "-",
        "weight_bits": 8,
        "settings": {},
        "argv": (),
        "model": "m",
    }
    return Peer(name="a-peer", steps=steps, **(fields | extra))  # type: ignore[arg-type]


def step(home: Path, program: str, title: str = "do it", **extra: float) -> Step:
    return Step(title, (sys.executable, "-c", program), home, **extra)  # type: ignore[arg-type]


def append(home: Path, mark: str) -> Step:
    log = str(home / "log")
    program = f"import os; os.makedirs({str(home)!r}, exist_ok=True); open({log!r}, 'a').write({mark!r})"
    return step(home, program, f"append {mark}")


def test_each_step_runs_once_and_in_order(tmp_path: Path) -> None:
    home = tmp_path / "venvs" / "x"
    wanted = peer(append(home, "a"), append(home, "b"))
    told: list[str] = []
    prepare(wanted, places(tmp_path), told.append)
    prepare(wanted, places(tmp_path), told.append)
    assert (home / "log").read_text() == "ab"
    assert told == ["a-peer: append a", "a-peer: append b"]
    assert pending(wanted) == []


def test_a_changed_command_runs_again(tmp_path: Path) -> None:
    home = tmp_path / "venvs" / "x"
    prepare(peer(append(home, "a")), places(tmp_path), print)
    assert pending(peer(append(home, "b"))) != []


def test_who_removes_the_environment_removes_its_stamps(tmp_path: Path) -> None:
    home = tmp_path / "venvs" / "x"
    wanted = peer(append(home, "a"))
    prepare(wanted, places(tmp_path), print)
    home.rename(tmp_path / "gone")
    assert pending(wanted) == list(wanted.steps)


def test_a_step_that_fails_is_one_sentence_and_is_tried_again(tmp_path: Path) -> None:
    home = tmp_path / "x"
    wanted = peer(step(home, "import sys; print('noise'); sys.exit('no such wheel')", "install it"))
    for _ in range(2):
        with pytest.raises(
            CannotRun, match=r"cannot install it: it ended with status 1: no such wheel; see "
        ):
            prepare(wanted, places(tmp_path), print)


def test_an_illegal_instruction_is_explained(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(CannotRun, match=r"died of SIGILL \(this CPU lacks an instruction it needs\)"):
        prepare(peer(step(tmp_path / "x", program)), places(tmp_path), print)


def test_a_step_that_hangs_and_a_program_that_is_not_there(tmp_path: Path) -> None:
    hangs = step(tmp_path / "x", "import threading; threading.Event().wait()", "wait", timeout_s=0.2)
    with pytest.raises(CannotRun, match="to wait took over 0 s"):
        prepare(peer(hangs), places(tmp_path), print)
    absent = Step("begin", (str(tmp_path / "nothing"),), tmp_path / "x")
    with pytest.raises(CannotRun, match="cannot begin: "):
        prepare(peer(absent), places(tmp_path), print)


def test_peers_import_bench_alone(tmp_path: Path) -> None:
    at = places(tmp_path)
    for _ in range(2):
        prepare(peer(), at, print)
    assert os.listdir(at.imports) == ["bench"]
    assert (at.imports / "bench").resolve() == REPOSITORY / "bench"


def test_versions_come_from_the_peers_own_environment() -> None:
    found = versions(peer(python=sys.executable, distributions=("msgspec",)))
    assert set(found) == {"python", "msgspec"}
    with pytest.raises(CannotRun, match="no-such-distribution"):
        versions(peer(python=sys.executable, distributions=("no-such-distribution",)))
    assert versions(peer()) == {}


def test_endings_in_words() -> None:
    assert ending(3) == "ended with status 3"
    assert ending(-signal.SIGKILL) == "died of SIGKILL"
