# `make test PYTHON=python3.13` installs into an environment of its own, .venv-3.13.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
VENV := $(if $(filter file,$(origin PYTHON)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
CONSTRAINTS := constraints/$(VERSION).txt
STAMP := $(VENV)/.installed

# Python then keeps what it compiles of the modules that it imports, as it does unless told otherwise: a new process
# would compile them again, which takes longer than to import them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo reproduce audit test test-slow test-quick test-solver coverage campaign lint docs serve bench constraints clean

install: $(STAMP)

$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(addprefix --constraint ,$(wildcard $(CONSTRAINTS))) --editable '.[dev]'
	touch $(STAMP)

demo: install  ## SRBA untuned beside four tuned solvers, on embedded data; the report is a page in demo/
	$(BIN)/bilevel run demo --store demo/store
	$(BIN)/bilevel report demo/store --out demo

reproduce: install  ## the experiments of the SRBA paper, by their full protocol
	$(BIN)/python -m paper reproduce all

audit: install  ## each claim of the SRBA paper with its verdict and the evidence
	$(BIN)/python -m paper audit

# Programs compiled by one run of the tests serve the next.
CACHE := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
# Most of the time of a test is XLA's, on programs that run once: it is told to optimize little. One test compares every
# solver with what it computes when XLA does its best, as it does for users, in the documentation and in the demo.
# XLA also splits a program into parts for threads, which takes an eighth of the time; with the workers below it gains
# nothing. JAX 0.11 and later have no fusion emitters to switch off, and end a process that is given an unknown flag.
MORE = $(shell $(BIN)/python -c "from importlib.metadata import version as v; \
	print('--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1' \
	if v('jax').startswith('0.10.') else '')")
HASTY = XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true $(MORE)"
# BLAS threads of two workers would wait for one another.
PYTEST = $(CACHE) $(HASTY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Without 64-bit types the defaults differ, and so may all that is done outside the arithmetic of a problem: building,
# drawing, casting, loading, results and what is solved in Python. Files on the rest state their dtype, in which they
# compute the same in either mode, and run once. The examples of the pages run only as users run them.
AS_USERS := tests/test_docs.py
BOTH_MODES := tests/engine/test_run.py tests/solvers/test_contract.py
BOTH_MODES_SLOW := tests/bench/test_cells.py tests/solvers/test_deterministic.py \
	$(addprefix tests/engine/test_,by_hand.py checkpoint.py long_training.py sweep.py) \
	$(addprefix tests/oracles/test_,accumulation.py host_data.py losses_of_batches.py samples.py) \
	$(addprefix tests/problems/test_,cross_validation.py derivatives.py input.py logistic_selection.py) \
	$(addprefix tests/problems/test_,losses.py problem.py quadratic.py real_data.py) \
	tests/differentiation/test_hypergradient.py
# The page on the paper prints commands that run tests of these files, which also pass as users have JAX.
PRINTED := $(addprefix tests/problems/test_,constants.py exact.py) \
	$(addprefix tests/paper/test_,progress.py valleys.py worst_case.py) \
	$(addprefix tests/theory/test_,descent.py identities.py steps.py)

test: install  ## the suite with 64-bit types on, then what may differ most with JAX as users have it
	JAX_ENABLE_X64=1 $(PYTEST) -m "not slow" --ignore=$(AS_USERS)
	JAX_ENABLE_X64=0 $(PYTEST) -m "not slow" $(AS_USERS) $(BOTH_MODES)

test-slow: install  ## every solver through every shared test, and their floors; the rest as users have JAX
	JAX_ENABLE_X64=1 $(PYTEST) -m slow --ignore=$(AS_USERS)
	JAX_ENABLE_X64=0 $(PYTEST) -m slow $(AS_USERS)
	JAX_ENABLE_X64=0 $(PYTEST) -m "not slow" $(BOTH_MODES_SLOW) $(PRINTED)

# Every solver against its transcription, and what a process finds without extras.
QUICK := tests/test_optional.py $(addprefix tests/solvers/test_,transcriptions.py contract.py deterministic.py)

test-quick: install  ## the part of the suite that differs most with the versions of Python and JAX
	JAX_ENABLE_X64=1 $(PYTEST) -m "not slow" $(QUICK)

test-solver: install  ## one solver through all shared tests: make test-solver S=StocBiO
	JAX_ENABLE_X64=1 $(PYTEST) --solver "$(S)" tests/solvers tests/engine tests/oracles

coverage: install  ## line coverage of both sets of tests, by module
	JAX_ENABLE_X64=1 $(PYTEST) --cov=bilevel --cov-report=term --cov-report=json:.coverage.json --ignore=$(AS_USERS)
	$(BIN)/python tests/coverage_floor.py .coverage.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github

# The variable leaves out the theme's notice about its successor, which is no finding about these pages.
docs: install  ## the site, into site/; tutorials are run, and any warning is an error
	NO_MKDOCS_2_WARNING=1 $(CACHE) $(BIN)/mkdocs build --strict
	@echo "built: site/. 'make serve' shows it at http://127.0.0.1:8000, with search."

serve:  ## the site as built, to this machine alone; a browser searches no pages that it opened from a folder
	@echo "http://127.0.0.1:8000 until Ctrl-C"
	@$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory site

bench: install  ## measure this machine; writes results/bench.md
	$(BIN)/python benchmarks/bench.py

campaign: install  ## the long form of the fault injection tests, in about two hours; `make test-slow` has the short form
	BILEVEL_CAMPAIGN=long $(CACHE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/faults --numprocesses 2

constraints: install  ## write the versions of this environment to the constraints of its Python
	$(BIN)/python -m pip freeze --exclude-editable --exclude setuptools > $(CONSTRAINTS)

clean:
	rm -rf $(VENV) .jax_cache demo site build *.egg-info
