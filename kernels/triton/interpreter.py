"""What Triton's interpreter needs to show what a device would do. Loaded only where kernels are interpreted.

1. A matrix product of the interpreter is a BLAS call, whose rows depend on their place in the tile; on tensor
   cores a row's sum is the same wherever it stands. Here each element of a product is one sum over k in one
   order, so that the interpreter can show whether a kernel's rows are independent.
2. At the start of a kernel, and of every function it calls, the interpreter walks through all of the language
   to give it another meaning, for a few milliseconds each time. Here that is done once and stays.
3. NumPy warns of infinities and of the NaNs between them, which kernels take for granted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter


def why_not() -> str | None:
    """None, or what keeps this pair of packages from interpreting: triton before 3.7 turns arrays into
    numbers in a way that NumPy 2.4 refuses."""
    import triton

    versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, np)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        return (
            f"triton {triton.__version__} cannot interpret with NumPy {np.__version__}: use NumPy below 2.4"
        )
    return None


class _PatchesOnce:
    """The interpreter's `_patch_lang`, for the first function of each module only."""

    def __init__(self) -> None:
        self._patch = triton_interpreter._patch_lang
        self._modules: set[str] = set()

    def __call__(self, function: Any) -> _PatchesOnce:
        if function.__module__ not in self._modules:
            self._patch(function)
            self._modules.add(function.__module__)
        return self

    def restore(self) -> None:
        """What is patched stays: whoever imports this interprets all its kernels."""


triton_interpreter._patch_lang = _PatchesOnce()


@contextlib.contextmanager
def like_a_device() -> Iterator[None]:
    builder = triton_interpreter.InterpreterBuilder
    original = builder.create_dot
    builder.create_dot = _dot
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=RuntimeWarning)
            # triton 3.6 and NumPy below 2.4
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
            yield
    finally:
        builder.create_dot = original


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a [m, k] · b [k, n] + d [m, n], summed in d's type."""
    left, right = (np.ascontiguousarray(side.data, dtype=d.data.dtype) for side in (a, b))
    product = np.einsum("mk,kn->mn", left, right)
    return triton_interpreter.TensorHandle(product + d.data, d.dtype.scalar)
