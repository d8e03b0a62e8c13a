"""The simulator against a live cluster on the same machine, under the same load."""
