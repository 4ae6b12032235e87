# pagetrie: `make help` lists the commands. Needs Python 3.11, gcc/g++ and make; the rest goes into .venv/.

PYTHON ?= python3.11
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# One set-up at a time per checkout, where the system has flock; what is up to date is decided under the lock.
LOCK := $(shell command -v flock >/dev/null 2>&1 && echo flock .cache/setup.lock)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup _setup serve demo test test-all test-avx512 test-sanitized soak lint format bench pins clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv: pinned dependencies, pagetrie itself, the bundled model (does nothing if all is there)
	@mkdir -p .cache
	@$(LOCK) $(MAKE) --no-print-directory _setup

_setup: $(VENV)/.installed
	@$(BIN)/python -m pagetrie.bundled path >/dev/null 2>&1 || $(BIN)/python -m pagetrie.bundled fetch

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "pagetrie needs Python 3.11 and found no '$(PYTHON)' on the PATH; name another with make PYTHON=/path/to/python" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "pagetrie needs Python 3.11 or newer, $(PYTHON) is %d.%d" % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) can't make virtual environments; install its venv module (Debian: apt-get install python3.11-venv)" >&2; \
	  exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The build tools go in first, pinned like the rest, so that the project is built with no second environment.
# A change to the kernels builds them anew, in build/, where what has not changed is kept.
$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard native/CMakeLists.txt native/src/*) $(VENV)/.created
	@command -v $${CXX:-c++} >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || { \
	  echo "pagetrie builds a native extension and found no C++ compiler; install g++ 9 or newer (Debian: apt-get install g++)" >&2; \
	  exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

serve: setup ## serve the bundled model: make serve PORT=8123 MODEL=/path/to/model ARGS="--num-pages 200"
	@exec $(BIN)/pagetrie serve $(if $(MODEL),'$(MODEL)') --host $(HOST) --port $(PORT) $(ARGS)

demo: setup ## 50 users on one system prompt, as a table: make demo ARGS="--users 10"
	@exec $(BIN)/pagetrie demo $(if $(MODEL),'$(MODEL)') $(ARGS)

test: setup ## the fast tests
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: setup ## all tests, the long ones too; the kernels' also on emulated AVX-512 and under sanitizers
	@$(BIN)/python -m pytest $(ARGS)
	@$(MAKE) --no-print-directory test-avx512 test-sanitized

test-avx512: setup ## the kernels' tests with AVX-512, emulated on AVX2
	@$(BIN)/python native/run_tests.py avx512 -q tests/native

test-sanitized: setup ## the same under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(BIN)/python native/run_tests.py sanitized -q tests/native

soak: setup ## random worlds against scheduler and cache: make soak SEEDS=10000, or STEPS=1000000, FIRST=5000
	@$(BIN)/python -m tests.simulation --first $(or $(FIRST),0) --seeds $(or $(SEEDS),$(if $(STEPS),1000000,2000)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

lint: setup ## ruff, mypy --strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## put the code in ruff's form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## the benchmarks
	@$(BIN)/python -m bench $(ARGS)

pins: ## renew constraints.txt from the ranges in pyproject.toml
	@$(PYTHON) -m venv --clear .cache/pins
	@.cache/pins/bin/python -m pip install --quiet '.[dev]'
	@{ sed -n '/^#/p' constraints.txt; \
	   .cache/pins/bin/python -m pip freeze --all --exclude pip --exclude wheel --exclude pagetrie \
	   | sed 's/+cpu$$//' | tr '[:upper:]' '[:lower:]' | LC_ALL=C sort; } > .cache/constraints.txt
	@mv .cache/constraints.txt constraints.txt

clean: ## remove .venv, caches and build output (the bundled model's folder stays)
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
