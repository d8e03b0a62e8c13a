"""Log lines as JSON name the request they are about."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.logging_setup import configure_logging
from cluster.request_context import current_request, enter_request
from cluster.role_config import LogConfig


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """The root logger writes JSON there; afterwards it is as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    for handler in before:
        root.removeHandler(handler)
    file = tmp_path / "router.log"
    configure_logging(LogConfig(format="json", file=str(file)), "router-0")
    yield file
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)


async def test_each_request_logs_under_its_own_id(log_file: Path) -> None:
    logger = logging.getLogger("test")

    async def serve(label: str) -> None:
        enter_request(label)
        await asyncio.sleep(0)
        await asyncio.to_thread(logger.info, "from a thread of %s", label)
        logger.info("to the end of %s", label)

    async with asyncio.TaskGroup() as tasks:
        for label in ("one", "two"):
            tasks.create_task(serve(label))
    logger.warning("FAILED", extra={"request": "chatcmpl-7"})
    assert current_request() is None
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert len(lines) == 5
    for line in lines[:-1]:
        assert line["request_id"] == line["message"].split()[-1]
        assert line["process"] == "router-0"
    assert "request_id" not in lines[-1]
    assert (lines[-1]["request"], lines[-1]["level"]) == ("chatcmpl-7", "warning")
