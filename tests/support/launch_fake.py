"""`python launch_fake.py SCRIPT [field=value ...]`: `serve` with fake roles, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.config_sources import resolve_config
from cluster.errors import BatonError
from cluster.launch import serve


class PrintReport:
    """One line per call, flushed: a test reads them as they come."""

    def phase(self, name: str) -> None:
        print(f"phase {name}", flush=True)

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        print(f"progress {phase} {done_bytes}/{total_bytes}", flush=True)

    def say(self, text: str) -> None:
        print(f"say {text}", flush=True)

    def ready(self) -> None:
        print("ready", flush=True)

    def stopping(self) -> None:
        print("stopping", flush=True)


def main() -> None:
    script = Path(sys.argv[1])
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    flags = dict(argument.split("=", 1) for argument in sys.argv[2:])
    given = {"model": str(script), "served_model_name": "fake", "log_dir": f"{script}.logs", **flags}
    config: ClusterConfig = resolve_config(given, {}).config
    answer = json.dumps({"directory": str(script)})
    command = [
        sys.executable,
        "-c",
        f'print(\'{{"phase": "converting", "done_bytes": 5, "total_bytes": 9}}\'); print({answer!r})',
    ]
    entries = dict.fromkeys(("router", "prefill", "decode"), "fake_roles:run")
    try:
        finish = serve(config, PrintReport(), entries=entries, command=command)
    except BatonError as error:
        sys.exit(f"error: {error}")
    if finish.error is not None:
        print(f"error: {finish.error}", file=sys.stderr)
    sys.exit(finish.exit_code)


if __name__ == "__main__":
    main()
