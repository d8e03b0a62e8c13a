"""Measurements: load tests, simulation, and committed results."""
