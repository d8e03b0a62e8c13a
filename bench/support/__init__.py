"""Parts of the protocol's other side, shared by benchmarks and tests."""
