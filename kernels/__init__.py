"""Compute kernels behind one set of operations (`kernels.ops`); kept empty on purpose, import submodules."""
