PYTHON ?= python3
MODEL ?= smollm2-135m
SEED ?= 0
OUTPUT ?=
VENV := .venv
# Every process would compile the packages again where the environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
TESTS ?= tests
JOBS ?= 3
DEMO := runs/demo$(if $(filter-out smollm2-135m,$(MODEL)),-$(MODEL))

.PHONY: help demo annotate test test-full lint format docs clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.* ## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.core ## align a real model and write OUTPUT/report.html (runs/demo); MODEL=tiny-llama takes a minute
	@$(VENV)/bin/align demo --model $(MODEL) --seed $(SEED) --output_dir $(or $(OUTPUT),$(DEMO))

annotate: $(VENV)/.ui ## start the labeling app
	@$(VENV)/bin/align annotate

# Three workers for two cores: many tests wait for a process or a browser.
test: $(VENV)/.dev ## run the tests; TESTS=tests/ppo runs some
	@$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SLOW) $(TESTS)

test-full: SLOW := -m 'not gpu' --durations=25
test-full: test ## run all tests, also those marked slow, as continuous integration does

lint: $(VENV)/.dev ## run ruff and mypy
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

format: $(VENV)/.dev ## apply ruff's fixes and its format
	@$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

docs: $(VENV)/.docs ## build the documentation site into site/; a warning is an error
	@$(VENV)/bin/python docs/write_settings.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

clean: ## remove environments and builds
	rm -rf $(VENV) $(PEER) $(LM_EVAL) build dist site *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)

# Packages are compiled when they are imported: to compile all of them takes longer than the rest of their installation.
$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two)"
	@$(PIP) --no-compile -e . && touch $@

$(VENV)/.ui: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two)"
	@$(PIP) -e '.[ui]' && touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) with the development tools (a few minutes)"
	@$(PIP) -e '.[ui,clean,deepspeed,dev]' && touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two)"
	@$(PIP) -e '.[docs]' && touch $@

include benchmarks/Makefile
