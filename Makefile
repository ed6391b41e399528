# Every command sets up what it needs, once, and reuses it: a virtual environment with SGLang in
# .venv (or .venv-VERSION for `make test SGLANG=VERSION`), and the package built into it.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
# An engine is several processes: without bytecode each compiles all of SGLang again.
unexport PYTHONDONTWRITEBYTECODE

# The newest of those that are tested.
DEFAULT_SGLANG := $(shell sed -n 's/^SGLANG_VERSIONS = (\(.*\)).*/\1/p' sglang_pat/support.py | grep -o '[0-9.]*[0-9]' | tail -1)
SGLANG ?= $(DEFAULT_SGLANG)
VENV := .venv$(if $(filter-out $(DEFAULT_SGLANG),$(SGLANG)),-$(SGLANG))
RUN := $(VENV)/bin/python
# The first of these that is usable; `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p .ci/check_python.py >/dev/null 2>&1 && { echo $$p; exit; }; done; echo python3)

# uv installs in a tenth of pip's time; it comes from pip, outside of the environments it fills.
UV_DIR := build/uv
UV := $(UV_DIR)/bin/uv
INSTALL := $(UV) pip install --quiet --python $(RUN)
# The package for development: its C++ code, and a link to this folder.
EDITABLE := build/editable/$(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
# Runs a command, and says every few seconds that it goes on.
SIGN_OF_LIFE := $(PYTHON) -m sglang_pat.cli.progress

CPP_SOURCES := $(shell find scheduler kernels/contract -type f -not -path 'scheduler/tests/*') kernels/bindings.cpp kernels/decode_params.h
CPP_FILES := $(shell find scheduler kernels -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup demo test test-fast test-sglang test-cpp fuzz mutants lint lint-ruff lint-format lint-mypy lint-imports lint-clang-format lint-workflows format bench-scheduler results docs wheels clean

help:
	@echo 'make demo             serve a live workload through pat and through SGLang, compare'
	@echo 'make test             everything that runs without a GPU (ARGS="..." goes to pytest)'
	@echo 'make test-fast        tests/unit only: no SGLang, two minutes on two cores'
	@echo 'make test-sglang      what depends on SGLang: the adapter, and one file of engine tests'
	@echo 'make test-cpp         C++ tests of the scheduler, under ASan and UBSan (ARGS="name" runs some)'
	@echo 'make fuzz             10,000 random plans and a million forest operations'
	@echo 'make mutants          mistakes in the code, which the tests must notice (ARGS="words" runs some)'
	@echo 'make lint             ruff, mypy, import-linter, clang-format'
	@echo 'make lint-workflows   workflows and the Kubernetes file against their schemas, releases by zizmor'
	@echo 'make format           let ruff and clang-format rewrite what they can'
	@echo 'make bench-scheduler  host time of planning (ARGS="--json FILE" to keep it)'
	@echo 'make results          write tables and pictures of the docs from benchmarks/results'
	@echo 'make docs             build the documentation into build/site, strictly'
	@echo 'make wheels           wheels with compiled kernels inside, in dist/'
	@echo 'make setup            only the environment; make clean removes every environment'
	@echo 'SGLANG=VERSION        run against another SGLang; the default is $(DEFAULT_SGLANG)'

demo: setup
	@$(RUN) -m sglang_pat demo $(ARGS)

# Two processes: one runs most tests that start engines, in turn, the other one all the rest.
PYTEST := $(RUN) -m pytest -n 2 --dist loadgroup

test: setup
	$(PYTEST) $(ARGS)

test-fast: setup
	$(PYTEST) tests/unit $(ARGS)

test-sglang: setup
	$(PYTEST) tests/sglang tests/engine/test_engine.py $(ARGS)

# With the compiler and CMake of the host, else with the CMake of the environment.
CPP_TESTS := build/cpp-tests
CMAKE := $(shell command -v cmake || echo $(VENV)/bin/cmake)

test-cpp: $(CPP_TESTS)/scheduler_tests
	$(CPP_TESTS)/scheduler_tests $(ARGS)
	$(CPP_TESTS)/scheduler_fuzz --plans 300 --operations 10000

fuzz: $(CPP_TESTS)/scheduler_tests
	$(CPP_TESTS)/scheduler_fuzz --plans 10000 --operations 1000000 $(ARGS)

mutants: setup
	@$(RUN) .ci/mutants.py $(ARGS)

$(CPP_TESTS)/scheduler_tests: $(CPP_SOURCES) $(wildcard scheduler/tests/*) $(if $(findstring $(VENV),$(CMAKE)),$(VENV)/.build-tools-installed)
	@$(CMAKE) -S scheduler/tests -B $(CPP_TESTS) >/dev/null
	@MAKEFLAGS=--no-print-directory $(CMAKE) --build $(CPP_TESTS) --parallel 2
	@touch $@

lint:  # all of them, even if one fails
	@$(MAKE) --keep-going --no-print-directory lint-ruff lint-format lint-mypy lint-imports lint-clang-format

lint-ruff: setup
	$(RUN) -m ruff check --quiet

lint-format: setup
	$(RUN) -m ruff format --check --quiet

lint-mypy: setup
	$(RUN) -m mypy

lint-imports: setup
	$(VENV)/bin/lint-imports --no-logo

lint-clang-format: setup
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

# Downloads its tools, so it is no part of `make lint`.
lint-workflows: | $(UV)
	$(UV) tool run --from check-jsonschema==0.35.0 check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(UV) tool run zizmor==1.32.0 --offline --quiet .github/workflows/release.yml
	$(UV) tool run --from kubernetes-validate==1.37.0 kubernetes-validate --strict --quiet docs/operate/deploy/kubernetes.yaml

format: setup
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	$(VENV)/bin/clang-format -i $(CPP_FILES)

bench-scheduler: setup
	@$(RUN) benchmarks/kernel scheduler $(ARGS)

RESULTS := benchmarks/results/h100

results: setup
	$(RUN) .ci/pages/recorded_runs_page.py
	$(RUN) .ci/pages/recorded_tables.py
	$(RUN) benchmarks/plot gain $(RESULTS)/compare-8b.json $(RESULTS)/kernels.json docs/gain.png

# Parses the sources: needs neither SGLang nor a compiler. Not --quiet: that hides what --strict counts.
docs: $(VENV)/.docs-installed
	@$(RUN) .ci/pages/recorded_runs_page.py --check
	@$(RUN) .ci/pages/recorded_tables.py --check
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# For the supported Pythons that are installed. Needs neither a GPU nor nvcc.
wheels: setup
	@$(INSTALL) --group pyproject.toml:wheels
	@$(RUN) .ci/wheels.py --uv $(UV) $(ARGS)

clean:
	rm -rf build .venv .venv-*

# --- set-up: stamps, so that each step runs again only when what it depends on has changed ---

setup:  # SGLang is downloaded while the scheduler is built
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.package-built

$(VENV)/.package-built: $(VENV)/.dependencies-installed $(EDITABLE)/.built
	@$(INSTALL) --no-deps --reinstall $(EDITABLE)/*.whl
	@touch $@

# For every environment of this Python: the C++ code needs neither torch nor SGLang.
$(EDITABLE)/.built: pyproject.toml $(CPP_SOURCES) | $(VENV)/.build-tools-installed
	@echo "Building the scheduler"
	@rm -rf $(EDITABLE) && mkdir -p $(EDITABLE)
	@MAKEFLAGS= PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(SIGN_OF_LIFE) "Building the scheduler" $(RUN) -c \
		'from scikit_build_core.build import build_editable as b; b("$(EDITABLE)", {"build-dir": "build/scheduler"})' \
		>$(EDITABLE)/log || { cat $(EDITABLE)/log; exit 1; }
	@touch $@

$(VENV)/.build-tools-installed: pyproject.toml | $(UV) $(RUN)
	@$(PYTHON) .ci/check_python.py --compiler
	@$(INSTALL) --group pyproject.toml:build
	@touch $@

$(VENV)/.dependencies-installed: pyproject.toml | $(VENV)/.build-tools-installed
	@echo "Installing SGLang $(SGLANG) into $(VENV) (first time: several GB, a minute or more)"
	@$(SIGN_OF_LIFE) "Installing SGLang" $(INSTALL) --requirements pyproject.toml --extra replay --extra test --extra bench --extra dev \
		"sglang==$(SGLANG)"
	@touch $@

$(VENV)/.docs-installed: pyproject.toml | $(UV) $(RUN)
	@$(INSTALL) --group pyproject.toml:docs
	@touch $@

$(RUN): | $(UV)
	@$(PYTHON) .ci/check_python.py
	@$(UV) venv --quiet --seed --allow-existing --python "$$(command -v $(PYTHON))" $(VENV)

$(UV):
	@$(PYTHON) .ci/check_python.py
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target $(UV_DIR) 'uv>=0.8'
