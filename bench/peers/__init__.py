"""Peers: other servers of the same model on the same cores, measured by the same load test."""
