"""The CPU backend: C++ kernels compiled for this machine on first use, see `backend`."""
