# Everything here needs Python 3.11 or newer, make and the package index; each target makes .venv by itself.
# PYTHON=/path/to/python chooses the interpreter. pip reads its own settings (PIP_* variables, pip.conf).

.PHONY: help demo test lint format bench triton docs reference coverage clean
.DEFAULT_GOAL := help

BIN := .venv/bin
# One thread per process: two test processes share two cores, and results do not depend on the thread count.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST_ARGS ?=
BENCHES := $(sort $(wildcard benchmarks/bench_*.py))

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo:  ## pre-train with SparseLoCo and with dense DiLoCo, then write a report to runs/demo
	@sh tools/venv.sh demo
	$(BIN)/sparseloco compare examples/demo.toml --out runs/demo --overwrite

test:  ## run the tests, all but those marked slow (PYTEST_ARGS=... is passed on)
	@sh tools/venv.sh dev
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow" $(PYTEST_ARGS)

lint:  ## ruff, formatting and pyright, without changing a file
	@sh tools/venv.sh dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --project tools/pyright-strict.json

format:  ## let ruff mend what it can
	@sh tools/venv.sh dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench:  ## run every benchmarks/bench_*.py
	@sh tools/venv.sh dev
	@$(if $(BENCHES),,echo "benchmarks: there is no benchmarks/bench_*.py yet, so nothing was measured" >&2; exit 1)
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python "$$bench"; done

triton:  ## install Triton (about 1 GB) and run the tests of its kernels in its interpreter
	@sh tools/venv.sh dev
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt "triton>=3.4"
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 tests/kernels $(PYTEST_ARGS)

docs:  ## build the documentation into build/site, strictly, after checking links, commands and generated pages
	@sh tools/venv.sh dev
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_docs_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict

reference:  ## write the generated pages of the documentation again
	@sh tools/venv.sh dev
	$(BIN)/python tools/reference.py

coverage:  ## the tests again, with branch coverage
	@sh tools/venv.sh dev
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow" --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
