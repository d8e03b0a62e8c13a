"""How a process logs: one handler on the root logger, text or JSON, to a private rotated file or stderr."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path
from typing import Final

from cluster.request_context import current_request
from cluster.role_config import LogConfig

MAX_FILE_BYTES: Final = 10 << 20
NUM_OLD_FILES: Final = 2


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, process, logger, message, and the traceback if any.

    `request_id` is the `x-request-id` of the HTTP request that the line was written for, `request` the
    cluster's own name of a request; each only where there is one.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = current_request()
        names = {"request_id": None if context is None else context.label, "request": None}
        for name, here in names.items():
            if (value := record.__dict__.get(name) or here) is not None:
                fields[name] = str(value)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(config: LogConfig, process: str) -> None:
    """Replace the root logger's handlers; called once, at the start of a process."""
    handler: logging.Handler
    if config.file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        Path(config.file).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = logging.handlers.RotatingFileHandler(
            config.file, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8"
        )
        os.chmod(config.file, 0o600)
    if config.format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s")
        )
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(config.level.upper())
