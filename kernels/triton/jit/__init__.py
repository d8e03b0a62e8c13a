"""Jitted code only. Each module is one or a few kernels, their formula and shapes; checks are the host's.

No module here may use `from __future__ import annotations`: triton reads the annotations of its parameters.
"""
