"""Distinct types for the names and numbers that identify things across processes."""

from typing import NewType

RequestId = NewType("RequestId", str)  # assigned by the gateway; the client's own id is only a label
Attempt = NewType("Attempt", int)  # 1, 2, ...: which try at a request; the fencing number
WorkerId = NewType("WorkerId", str)  # stable across restarts, e.g. "prefill-0"
RouterId = NewType("RouterId", str)
Epoch = NewType("Epoch", int)  # grows each time a worker starts
LeaseId = NewType("LeaseId", int)  # unique within one (decode worker, epoch)
BlockId = NewType("BlockId", int)  # index into one worker's KV pool
BlockHash = NewType("BlockHash", bytes)  # chained digest of a full block of tokens, 16 bytes
PieceIndex = NewType("PieceIndex", int)  # 0, 1, ...: order of the pieces within one attempt
