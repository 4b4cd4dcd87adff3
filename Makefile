# Each target sets up what it needs; the first run installs into .venv.
PY := .venv/bin/python
# Threads of numeric libraries: two test workers share the machine.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1

.PHONY: help setup programs demo test test-long test-vllm check lint bench docs clean

help:
	@echo "make demo   collect real rollouts with a real small model, then look at them"
	@echo "make test   everything CI runs: lint, types, floors, all tests"
	@echo "make check  the same without the slow tests"
	@echo "make test-long  the campaigns in full size; TOPROPE_CAMPAIGN=4 makes them four times as large"
	@echo "make test-vllm  install a stock vLLM (3 GB) and test against it; writes docs/reference/vllm.md"
	@echo "make bench  benchmarks, as ratios against a baseline of the same run"
	@echo "make docs   write the generated reference pages"
	@echo "make setup  build .venv for development"

setup:
	@scripts/setup.sh dev

demo:
	@scripts/setup.sh demo
	@.venv/bin/toprope demo

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports

programs: setup
	@scripts/programs.sh

test: lint programs
	@$(PY) -m pytest -n 2 --dist loadfile -m "not long"

test-long: setup
	@$(PY) -m pytest -m long -s

check: lint
	@$(PY) -m pytest -n 2 --dist loadfile -m "not slow and not long"

test-vllm: setup
	@scripts/vllm_leg.sh

bench: setup
	@$(PY) -m bench

docs: setup
	@$(PY) scripts/make_docs.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
