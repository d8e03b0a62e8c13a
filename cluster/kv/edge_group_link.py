"""One connection between a prefill and a decode rank: a process group of two, straight from a store.

Life of a link:

1. D (rank 0) listens: a key-value store of this edge alone, on a port of its own of the given host.
2. P (rank 1) dials it, and says so in the store. Only then do both build the process group, under a prefix
   that names both workers, their epochs and a nonce from D, so a stranger on a reused port never matches.
3. One byte goes over it: what is set up with the first transfer is there before the first piece.
4. Transfers are posted without blocking and waited for with a deadline, which a watchdog keeps
   (`edge_watch`). When one passes or the peer dies, what is posted fails on both sides; no other link
   notices. A failed link is rebuilt with new epochs, never repaired.
5. `break_off` fails whatever waits, from any thread; then `close` lets go of sockets and threads.

One gap in gloo shapes its use: a transfer of which some bytes have moved is *not* failed when the
connection closes; whoever waits for it waits until its deadline. So nobody waits for a long transfer: each is
followed by a short one that is waited for instead (`edge_group_parts`), and is complete when that is.

All methods block and belong in an edge's thread, but for `break_off`, and `listen` which takes milliseconds.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist

from cluster.errors import EdgeError, first_line
from cluster.kv.edge import EdgeName
from cluster.kv.edge_backends import NUM_RANKS, GroupBackend
from cluster.kv.edge_watch import EdgeWatch

logger = logging.getLogger(__name__)

DECODE_RANK = 0
PREFILL_RANK = 1
_DIALLED = "dialled"  # store key: P is there, build the group
NUM_TAGS = 2**31 - 2  # tags of pieces: [1, NUM_TAGS)
_WARM_TAG = NUM_TAGS
_GRACE_S = 1.0  # a group's own timeout comes after the watchdog's


class GroupLink:
    """One end of the connection, whichever rank."""

    def __init__(
        self,
        name: EdgeName,
        rank: int,
        address: tuple[str, int],
        prefix: str,
        connect_timeout_s: float,
        backend: GroupBackend,
        store: Any = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self._rank = rank
        self._peer_rank = NUM_RANKS - 1 - rank
        self._peer_role = "prefill" if rank == DECODE_RANK else "decode"
        self._prefix = prefix
        self._connect_timeout_s = connect_timeout_s
        self._store = store
        self._address = address
        self._group: Any = None
        self._lock = threading.Lock()  # over `_group` and `_broken`
        self._broken: str | None = None
        self._is_connected = False
        self._watch = EdgeWatch(f"kv-edge {name}", self._be_late)

    @classmethod
    def listen(
        cls, name: EdgeName, host: str, connect_timeout_s: float, backend: GroupBackend
    ) -> tuple[GroupLink, dict[str, str | int]]:
        """D's end, and the endpoint to give to P.

        Raises:
            EdgeError: `host` is not an address of this machine.
        """
        nonce = secrets.token_hex(16)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.bind(address)
                listener.listen()
                port = int(listener.getsockname()[1])
                # The store's server takes the descriptor over, so it is bound to `host` and nothing else.
                store = dist.TCPStore(
                    host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=connect_timeout_s),
                    master_listen_fd=listener.detach(),
                )
        except (OSError, RuntimeError) as error:
            raise EdgeError(f"KV edge {name}: cannot listen on {host}: {_said(error)}") from error
        prefix = f"{backend.name}/{name}/{nonce}"
        link = cls(name, DECODE_RANK, (host, port), prefix, connect_timeout_s, backend, store)
        return link, {"host": host, "port": port, "nonce": nonce}

    @classmethod
    def dial(
        cls,
        name: EdgeName,
        endpoint: dict[str, str | int],
        connect_timeout_s: float,
        backend: GroupBackend,
    ) -> GroupLink:
        """P's end, not connected yet.

        Raises:
            EdgeError: the endpoint is not that of such an edge.
        """
        host, port, nonce = endpoint.get("host"), endpoint.get("port"), endpoint.get("nonce")
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(nonce, str)):
            raise EdgeError(
                f"KV edge {name}: {backend.name} needs `host`, `port` and `nonce`, not {sorted(endpoint)}"
            )
        prefix = f"{backend.name}/{name}/{nonce}"
        return cls(name, PREFILL_RANK, (host, port), prefix, connect_timeout_s, backend)

    def connect(self, warm: Tensor) -> None:
        """Build the process group, waiting for the peer; `warm` is an element of the memory that it carries.

        Raises:
            EdgeError: the peer did not come, or the link was broken off.
        """
        try:
            host = self._await_dial() if self._rank == DECODE_RANK else self._dial()
            store = dist.PrefixStore(self._prefix, self._store)
            group = self.backend.make_group(store, self._rank, host, self._connect_timeout_s)
        except (OSError, RuntimeError) as error:
            raise self.failure(f"no connection to the {self._peer_role} worker: {_said(error)}") from error
        with self._lock:
            if self._broken is not None:
                raise EdgeError(self._broken)
            self._group = group
        warm_up = self.send if self._rank == PREFILL_RANK else self.receive
        self.wait(warm_up(warm, _WARM_TAG), time.monotonic() + self._connect_timeout_s)
        self._is_connected = True

    def send(self, tensor: Tensor, tag: int) -> Any:
        """Post the sending of a contiguous tensor, which lives until `wait` has taken the returned work."""
        return self._post(lambda group: group.send([tensor], self._peer_rank, tag))

    def receive(self, tensor: Tensor, tag: int) -> Any:
        """Post a receive into a contiguous tensor, which lives until `close`; returns work for `wait`."""
        return self._post(lambda group: group.recv([tensor], self._peer_rank, tag))

    def wait(self, work: Any, deadline: float) -> None:
        """Until the transfer is done; `deadline` in `time.monotonic()` seconds.

        Raises:
            EdgeError: the deadline passed or the peer is gone; the link is dead.
        """
        timeout_s = max(0.0, deadline - time.monotonic()) + _GRACE_S
        try:
            with self._watch.guard(deadline):
                done = self.backend.wait(work, timeout_s)
        except RuntimeError as error:
            raise self.failure(self._explain(error)) from error
        if not done:
            raise self.failure("a transfer was aborted")

    def break_off(self, reason: str) -> None:
        """Fail everything that waits on this link, on both sides; takes some milliseconds. Idempotent.

        Raises:
            EdgeError: the group does not let go.
        """
        with self._lock:
            if self._broken is None:
                self._broken = f"KV edge {self.name}: {reason}"
            group = self._group
        if group is not None:
            try:
                self.backend.break_off(group, self._peer_rank)
            except RuntimeError as error:
                raise EdgeError(
                    f"KV edge {self.name}: its transfers cannot be aborted: {_said(error)}"
                ) from error
        elif self._rank == DECODE_RANK and self._store is not None:
            self._stop_waiting_for_dial()

    def close(self) -> None:
        """Let go of sockets and threads; nothing may be waiting. Idempotent."""
        with self._lock:
            self._broken = self._broken or f"KV edge {self.name}: closed"
            self._group = None
        self._watch.close()
        self._store = None

    def _post(self, post: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._broken is not None:
                raise EdgeError(self._broken)
            group = self._group
        try:
            return post(group)
        except RuntimeError as error:
            raise self.failure(self._explain(error)) from error

    def _await_dial(self) -> str:
        self._store.wait([f"{self._prefix}/{_DIALLED}"])
        with self._lock:
            if self._broken is not None:
                raise EdgeError(self._broken)
        return self._address[0]

    def _dial(self) -> str:
        """Connect to D's store; returns our own address on the way there."""
        # The store's client retries what is refused until its timeout; a probe fails at once.
        with socket.create_connection(self._address, timeout=self._connect_timeout_s) as probe:
            own_host = str(probe.getsockname()[0])
        self._store = dist.TCPStore(
            *self._address,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._connect_timeout_s),
        )
        self._store.set(f"{self._prefix}/{_DIALLED}", "yes")
        return own_host

    def _stop_waiting_for_dial(self) -> None:
        """`connect` sits in the store's client of this process; another client gives it what it waits for."""
        try:
            client = dist.TCPStore(
                *self._address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1)
            )
            client.set(f"{self._prefix}/{_DIALLED}", "no")
        except RuntimeError as error:
            raise EdgeError(f"KV edge {self.name}: its store does not answer: {_said(error)}") from error

    def _explain(self, error: RuntimeError) -> str:
        text = _said(error)
        if "Timed out waiting" in text:
            return self._too_late()
        if not self._is_connected:  # NCCL finds out only now whether it can work between these two
            return f"no connection to the {self._peer_role} worker: {text}"
        return f"the {self._peer_role} worker is gone: {text}"

    def _too_late(self) -> str:
        return f"the {self._peer_role} worker did not take part in a transfer before its deadline"

    def _be_late(self) -> None:
        """The watchdog's thread: a deadline has passed."""
        try:
            self.break_off(self._too_late())
        except EdgeError as error:  # whoever closes the edge gets it too
            logger.error("%s", error)

    def failure(self, reason: str) -> EdgeError:
        """Mark the link dead; the first reason stays."""
        with self._lock:
            if self._broken is None:
                self._broken = f"KV edge {self.name}: {reason}"
            return EdgeError(self._broken)


def _said(error: BaseException) -> str:
    """Groups and stores put the place in their source before it."""
    return first_line(error).rsplit("third_party/", 1)[-1]
