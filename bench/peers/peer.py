"""What a peer is: how it is made ready, started and described. Values only; nothing here does anything.

1. `catalogue` describes every peer for one machine and one set of `Places`.
2. `prepare` runs its steps, each once (a stamp remembers), and asks for its versions.
3. `server` starts its command on a port and waits until it answers.
4. `compare_peers` measures it and writes its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PORT = "{port}"


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are. All that is made for peers lies below `cache`, outside the repository."""

    cache: Path
    repository: Path
    python: str  # Baton's own interpreter, with everything Baton needs
    model: str  # as Baton's `--model` takes it
    gguf: Path | None  # the model's GGUF file, if it has one
    tcmalloc: Path | None  # the system's library, if it is installed
    coded_bits: float | None = (
        None  # per weight, where Baton keeps the GGUF's own codes, in the mean; else None
    )

    @property
    def model_name(self) -> str:
        return "demo" if self.model == "demo" else Path(self.model).stem

    def venv(self, name: str) -> Path:
        return self.cache / "venvs" / name

    def venv_python(self, name: str) -> str:
        return str(self.venv(name) / "bin" / "python")

    def model_directory(self, kind: str) -> Path:
        return self.cache / "models" / f"{self.model_name}-{kind}"

    @property
    def imports(self) -> Path:
        """A directory with nothing but `bench`: peers must not see Baton's other packages, whose names
        (`kernels`) their libraries probe for."""
        return self.cache / "imports"

    @property
    def logs(self) -> Path:
        return self.cache / "logs"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a preparation. Peers that share a step run it once.

    Its stamp lies in `home`, the environment or model it makes or changes: who removes the one removes both.
    """

    title: str
    argv: tuple[str, ...]
    home: Path
    environment: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Peer:
    """One server, in one configuration: a row of the table."""

    name: str
    title: str
    precision: str  # weights and arithmetic, as the table tells
    weight_bits: float  # as stored and read in a step of few rows
    settings: Mapping[str, str]  # every setting that was chosen, with its reason where it has one
    argv: tuple[str, ...]  # `{port}` stands for the port
    model: str  # as requests name it
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    needs_isa: frozenset[str] = frozenset()  # CPU flags, by the kernel's names
    needs_files: tuple[tuple[Path, str], ...] = ()  # (file, what to do if it is missing)
    python: str | None = None  # the interpreter whose `distributions` are its versions
    distributions: tuple[str, ...] = ()
    is_baton: bool = False
    family: str = ""  # variants of one server; the fastest of them is searched for max goodput
    kv_bits: float = 16.0
    arithmetic_bits: float | None = None  # of products, where they are not those of weights as stored
    makes_guesses: bool = False  # at tokens, from text that was there before: a step may give more than one
    why_unusual: str | None = None  # why it is measured only when it is named; None: it always is
    start_timeout_s: float = 300.0

    @property
    def is_usual(self) -> bool:
        return self.why_unusual is None

    def command(self, port: int) -> list[str]:
        return [part.replace(PORT, str(port)) for part in self.argv]


def why_not(peer: Peer, isa: frozenset[str]) -> str | None:
    """Why this peer cannot run here, as far as can be told before trying; None: nothing speaks against it."""
    missing = sorted(peer.needs_isa - isa)
    if missing:
        return f"its kernels need {', '.join(missing)}, which this CPU does not have"
    for file, advice in peer.needs_files:
        if not file.is_file():
            return f"{file} is missing: {advice}"
    return None
