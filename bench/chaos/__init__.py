"""Chaos on the real thing: workers are killed, stopped and drained under load; all streams are compared."""
