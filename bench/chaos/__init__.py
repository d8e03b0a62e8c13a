"""Chaos on the real thing: workers are killed, stopped and terminated under load; all streams are compared."""
