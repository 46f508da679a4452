PYTHON ?= python3
MODEL ?= smollm2-135m
SEED ?= 0
OUTPUT ?=
VENV := .venv
# Every process would compile the packages again where the environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
UV := UV_PROJECT_ENVIRONMENT=$(VENV) UV_PYTHON_DOWNLOADS=never $(VENV)/bin/uv
# --inexact keeps what other targets installed.
SYNC := $(UV) sync -q --frozen --inexact --no-install-package torch
UPGRADE ?=
TESTS ?= tests
JOBS ?= 3
DEMO := runs/demo$(if $(filter-out smollm2-135m,$(MODEL)),-$(MODEL))

.PHONY: help demo annotate test test-full lint format docs wheel lock clean

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

wheel: $(VENV)/bin/uv ## build the wheel into dist/
	@$(UV) build -q --wheel

lock: $(VENV)/bin/uv ## resolve uv.lock and constraints.txt again; UPGRADE=--upgrade takes new versions
	@$(UV) lock -q $(UPGRADE)
	@{ sed -n '/^#/p' constraints.txt && $(UV) export -q --frozen --all-extras --all-groups --no-emit-project --no-hashes \
	--no-annotate --no-header | sed 's/ ;.*//'; } >$(VENV)/constraints.txt && mv $(VENV)/constraints.txt constraints.txt

clean: ## remove environments and builds
	rm -rf $(VENV) $(PEER) $(LM_EVAL) build dist site *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/bin/uv: constraints.txt | $(VENV)/bin/python
	@$(PIP) uv && touch $@

# With an NVIDIA driver, uv takes the CUDA build from PyTorch's index, otherwise the CPU build. If it cannot, pip's settings
# decide: by default, PyPI's build.
$(VENV)/.torch: constraints.txt $(VENV)/bin/uv
	@echo "installing torch into $(VENV)"
	@UV_HTTP_RETRIES=1 $(UV) pip install -q -c constraints.txt --torch-backend=auto torch 2>$(VENV)/torch.log || \
	{ echo "PyTorch's index has no build for this machine, or cannot be reached ($(VENV)/torch.log): asking pip"; \
	$(PIP) --no-compile torch; }
	@touch $@

# Packages are compiled when they are imported: to compile all of them takes longer than the rest of their installation.
$(VENV)/.core: pyproject.toml uv.lock $(VENV)/.torch
	@echo "installing into $(VENV) (up to a minute)"
	@$(SYNC) && touch $@

$(VENV)/.ui: pyproject.toml uv.lock $(VENV)/.torch
	@echo "installing into $(VENV) (up to a minute)"
	@$(SYNC) --extra ui && touch $@

$(VENV)/.dev: pyproject.toml uv.lock $(VENV)/.torch
	@echo "installing into $(VENV) with the development tools (a minute or two)"
	@$(SYNC) --compile-bytecode --extra ui --extra clean --extra deepspeed --extra dev && touch $@

$(VENV)/.docs: pyproject.toml uv.lock $(VENV)/.torch
	@echo "installing into $(VENV) (up to a minute)"
	@$(SYNC) --extra docs && touch $@

include benchmarks/Makefile
