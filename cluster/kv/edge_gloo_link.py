"""One gloo connection between a prefill and a decode rank: a process group of two, straight from a store.

Life of a link:

1. D (rank 0) listens: a key-value store of this edge alone, on a port of its own of the given host.
2. P (rank 1) dials it, and says so in the store. Only then do both build the process group, under a prefix
   that names both workers, their epochs and a nonce from D, so a stranger on a reused port never matches.
3. Transfers are posted without blocking and waited for with a deadline. When a deadline passes or the peer
   dies, gloo closes the connection and fails what is posted on it, on both sides; no other link notices. A
   failed link is rebuilt with new epochs, never repaired.
4. `break_off` fails whatever waits, from any thread; then `close` lets go of sockets and threads.

One gap in gloo shapes its use: a transfer of which some bytes have moved is *not* failed when the
connection closes; whoever waits for it waits until its deadline. So nobody waits for a long transfer: each is
followed by a short one that is waited for instead (`edge_gloo_parts`), and is complete when that is.

All methods block and belong in an edge's thread, but for `break_off`, and `listen` which takes milliseconds.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cluster.errors import EdgeError
from cluster.kv.edge import EdgeName

DECODE_RANK = 0
PREFILL_RANK = 1
_NUM_RANKS = 2
_DIALLED = "dialled"  # store key: P is there, build the group
_BREAK_TAG = 0  # no transfer uses it
NUM_TAGS = 2**31 - 1  # tags of transfers: [1, NUM_TAGS)


class GlooLink:
    """One end of the connection, whichever rank."""

    def __init__(
        self,
        name: EdgeName,
        rank: int,
        address: tuple[str, int],
        prefix: str,
        connect_timeout_s: float,
        store: Any = None,
    ) -> None:
        self.name = name
        self._rank = rank
        self._peer_rank = _NUM_RANKS - 1 - rank
        self._peer_role = "prefill" if rank == DECODE_RANK else "decode"
        self._prefix = prefix
        self._connect_timeout_s = connect_timeout_s
        self._store = store
        self._address = address
        self._group: Any = None
        self._lock = threading.Lock()  # over `_group` and `_broken`
        self._broken: str | None = None

    @classmethod
    def listen(
        cls, name: EdgeName, host: str, connect_timeout_s: float
    ) -> tuple[GlooLink, dict[str, str | int]]:
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
            raise EdgeError(f"KV edge {name}: cannot listen on {host}: {_first_line(error)}") from error
        link = cls(name, DECODE_RANK, (host, port), f"{name}/{nonce}", connect_timeout_s, store)
        return link, {"host": host, "port": port, "nonce": nonce}

    @classmethod
    def dial(cls, name: EdgeName, endpoint: dict[str, str | int], connect_timeout_s: float) -> GlooLink:
        """P's end, not connected yet."""
        host, port, nonce = endpoint.get("host"), endpoint.get("port"), endpoint.get("nonce")
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(nonce, str)):
            raise EdgeError(f"KV edge {name}: gloo needs `host`, `port` and `nonce`, not {sorted(endpoint)}")
        return cls(name, PREFILL_RANK, (host, port), f"{name}/{nonce}", connect_timeout_s)

    def connect(self) -> None:
        """Build the process group, waiting for the peer.

        Raises:
            EdgeError: the peer did not come, or the link was broken off.
        """
        try:
            host = self._await_dial() if self._rank == DECODE_RANK else self._dial()
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=self._connect_timeout_s)
            options._threads = 1
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            group = dist.ProcessGroupGloo(
                dist.PrefixStore(self._prefix, self._store), self._rank, _NUM_RANKS, options
            )
        except (OSError, RuntimeError) as error:
            raise self.failure(
                f"no connection to the {self._peer_role} worker: {_first_line(error)}"
            ) from error
        with self._lock:
            if self._broken is not None:
                raise EdgeError(self._broken)
            self._group = group

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
        timeout_s = max(0.001, deadline - time.monotonic())
        try:
            done = work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self.failure(self._explain(error)) from error
        if not done:
            raise self.failure("a transfer was aborted")

    def break_off(self, reason: str) -> None:
        """Fail everything that waits on this link, on both sides; takes some milliseconds. Idempotent."""
        with self._lock:
            if self._broken is None:
                self._broken = f"KV edge {self.name}: {reason}"
            group = self._group
        if group is not None:
            # gloo has no call for this, but a receive whose time is up closes the connection.
            try:
                group.recv([torch.empty(1)], self._peer_rank, _BREAK_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return  # as it should: the connection is closed, now or already
        elif self._rank == DECODE_RANK and self._store is not None:
            self._stop_waiting_for_dial()

    def close(self) -> None:
        """Let go of sockets and threads; nothing may be waiting. Idempotent."""
        with self._lock:
            self._broken = self._broken or f"KV edge {self.name}: closed"
            self._group = None
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
            raise EdgeError(
                f"KV edge {self.name}: its store does not answer: {_first_line(error)}"
            ) from error

    def _explain(self, error: RuntimeError) -> str:
        text = _first_line(error)
        if "Timed out waiting" in text:
            return f"the {self._peer_role} worker did not take part in a transfer before its deadline"
        return f"the {self._peer_role} worker is gone: {text}"

    def failure(self, reason: str) -> EdgeError:
        """Mark the link dead; the first reason stays."""
        with self._lock:
            if self._broken is None:
                self._broken = f"KV edge {self.name}: {reason}"
            return EdgeError(self._broken)


def _first_line(error: BaseException) -> str:
    """gloo and the store explain in paragraphs, after the place in their source."""
    return (str(error).splitlines() or [type(error).__name__])[0].rsplit("third_party/", 1)[-1][:200]
