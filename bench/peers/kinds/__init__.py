"""One module per kind of peer: how it is installed, started and fairly set."""
