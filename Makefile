PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-slow lint docs bench constraints clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: install  ## sweep, select and time four solvers on embedded data; the report is a page in demo/
	$(BIN)/bilevel run demo --store demo/store
	$(BIN)/bilevel report demo/store --out demo

# Programs compiled by the first pass serve the second.
PYTEST := JAX_COMPILATION_CACHE_DIR=.jax_cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# What does not compute with JAX passes or fails alike in both modes.
ONE_MODE := tests/datasets tests/transcription tests/test_cli.py tests/test_site.py \
	$(addprefix tests/bench/test_,config.py store.py select.py curves.py figures.py report.py execute.py)

test: install  ## the whole suite with 64-bit types on, then once more with JAX as users have it
	JAX_ENABLE_X64=1 $(PYTEST) -m "not slow"
	JAX_ENABLE_X64=0 $(PYTEST) -m "not slow" $(addprefix --ignore=,$(ONE_MODE))

test-slow: install  ## every solver through every shared test, and their floors
	JAX_ENABLE_X64=1 $(PYTEST) -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The variable leaves out the theme's notice about its successor, which is no finding about these pages.
docs: install  ## the site, into site/; tutorials are run, and any warning is an error
	NO_MKDOCS_2_WARNING=1 JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache $(BIN)/mkdocs build --strict

bench: install  ## measure this machine; writes results/bench.md
	$(BIN)/python benchmarks/bench.py

constraints: install  ## write the versions of this environment to constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) .jax_cache demo site build *.egg-info
