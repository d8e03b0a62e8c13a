"""Threads of a team part where two of them meet on one core, and only there."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.compiled_source import compiled

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores that it may choose"
)
TRIES = 20
MOST = 15  # of the tries: the kernel may move a thread at any time


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("places_moves.cpp")
    library = compiled(source, tmp_path_factory.mktemp("places"))
    library.places_core_after_waking.restype = ctypes.c_int64
    return library


def cores_after_waking(
    library: ctypes.CDLL, start: int, allowed: Sequence[int], *, has_left: bool = False
) -> list[int]:
    array = (ctypes.c_int64 * len(allowed))(*allowed)
    arguments = (ctypes.c_int64(start), array, ctypes.c_int64(len(allowed)), ctypes.c_int64(has_left))
    return [library.places_core_after_waking(*arguments) for _ in range(TRIES)]


def test_who_wakes_where_another_works_moves_and_keeps_its_cores(library: ctypes.CDLL) -> None:
    here, there, *_ = sorted(os.sched_getaffinity(0))
    cores = cores_after_waking(library, here, (here, there))
    assert -1 not in cores
    assert cores.count(there) >= MOST


def test_who_wakes_where_nobody_works_stays(library: ctypes.CDLL) -> None:
    here, there, *_ = sorted(os.sched_getaffinity(0))
    cores = cores_after_waking(library, here, (here, there), has_left=True)
    assert -1 not in cores
    assert cores.count(here) >= MOST


def test_where_there_is_one_core_they_share_it(library: ctypes.CDLL) -> None:
    here = min(os.sched_getaffinity(0))
    assert set(cores_after_waking(library, here, (here,))) == {here}
