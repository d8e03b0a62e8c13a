"""`python -m bench.gpu_check`: is the GPU path right on this machine, and how fast?

1. Each part runs in a process of its own, within what is left of `--seconds`, what is right or wrong first:
   (a) every kernel against the reference, (b) invariance, (c) prefill and decode in two processes over
   `cuda_ipc`, (d) an `nccl` edge, (e) rates of kernels and of the engine. A part that fails or dies is told
   with what it had found, and the next one begins.
2. A text table is printed, at its end what is aimed at beside what was found (`goals`), and with `--out`
   everything is written as JSON, again after each part.

`--interpret` runs the same flow on a CPU, in Triton's interpreter, on tiny shapes, with `shm` and `gloo` in
place of the edges between GPUs. Exit status 1 if something asserted does not hold.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import msgspec

from bench.gpu_check.report import Head, Line, Part, Report, render, render_lines
from kernels.triton.tiles import MODE_VARIABLE

PART_NAMES = ("correctness", "invariance", "handover", "edge", "kernels", "engine")
_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="on a CPU: tiny shapes, no rates")
    parser.add_argument("--out", type=Path, help="write the result too, as JSON")
    parser.add_argument("--only", choices=PART_NAMES, action="append", help="this part; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="for everything; what is late is stopped"
    )
    parser.add_argument("--part", choices=PART_NAMES, help=argparse.SUPPRESS)  # the process of a part
    arguments = parser.parse_args()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.pop(MODE_VARIABLE, None)  # both are measured, and what must be exact is
    if arguments.part is not None:
        _write_part(arguments.part, arguments.out)
        return
    device = _device_or_exit()
    deadline_s = time.monotonic() + arguments.seconds
    report = Report(device=device, interpreted=arguments.interpret, versions=_versions(), parts=())
    if arguments.out is not None and (reason := _write(report, arguments.out)):
        parser.error(f"--out: {reason}")  # now, not after minutes
    for name in PART_NAMES:
        if arguments.only is None or name in arguments.only:
            part = _run_in_process(name, deadline_s, interpret=arguments.interpret)
            print("\n".join([f"\n{part.title}", *render_lines(part.lines), part.error or ""]), flush=True)
            report = msgspec.structs.replace(report, parts=(*report.parts, part))
            # whoever stops this finds what there is
            if arguments.out is not None and (reason := _write(report, arguments.out)):
                print(reason, file=sys.stderr)
    print("\n" + "=" * 100 + "\n" + render(report))
    sys.exit(0 if report.holds else 1)


def _write(report: Report, path: Path) -> str | None:
    """As JSON; why it could not be."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return None


def _device_or_exit() -> str:
    from kernels.triton.availability import interpreting, why_unavailable

    if reason := why_unavailable():
        hint = "" if reason.endswith("triton") else "; `--interpret` shows the flow on a CPU"
        sys.exit(f"{reason}{hint}")
    if interpreting():
        from kernels.triton.interpreter import why_not

        if reason := why_not():
            sys.exit(reason)
    from bench.gpu_check.parts import device_name

    return device_name()


def _write_part(name: str, path: Path) -> None:
    from bench.gpu_check.parts import run_part

    with path.open("w", encoding="utf-8") as out:
        run_part(name, out)


def _run_in_process(name: str, deadline_s: float, *, interpret: bool) -> Part:
    """The part's result; of a process that did not end well, what it had found and what it said last."""
    started_s = time.monotonic()
    error = None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "part.jsonl"
        command = [sys.executable, "-m", "bench.gpu_check", "--part", name, "--out", str(path)]
        command += ["--interpret"] if interpret else []
        try:
            result = subprocess.run(
                command,
                cwd=_ROOT,
                stderr=subprocess.PIPE,
                text=True,
                timeout=max(1.0, deadline_s - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            error = f"stopped after {time.monotonic() - started_s:.0f} s: no time was left"
        else:
            sys.stderr.write(result.stderr)
            if result.returncode != 0:
                said = result.stderr.strip().splitlines() or ["it said nothing"]
                error = f"ended with status {result.returncode}: {said[-1]}"
        head, lines = _read(path, name)
    seconds = time.monotonic() - started_s
    return Part(name=name, title=head.title, note=head.note, lines=lines, error=error, seconds=seconds)


def _read(path: Path, name: str) -> tuple[Head, tuple[Line, ...]]:
    """What a process has written; of one that was stopped, the last line may be cut short and is left out."""
    written = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    if not written:
        return Head(name, ""), ()
    head = msgspec.json.decode(written[0], type=Head)
    return head, tuple(msgspec.json.decode(line, type=Line) for line in written[1:])


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


if __name__ == "__main__":
    main()
