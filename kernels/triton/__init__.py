"""The GPU backend: Triton kernels and their host side. Import `availability` first: the rest needs triton."""
