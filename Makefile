# make demo   installs what is needed into .venv, aligns a real model, writes runs/demo/report.html
# make bench  measures against the peers (TRL, transformers) and writes the table into benchmarks/README.md
# make gpu-kit   makes build/gpu-kit: what a GPU machine without network needs; WEIGHTS=2 also SmolLM2's weights, in two parts
# make gpu-test  the tests that need a GPU; KIT=build/gpu-kit where that kit is all there is; what they found goes to OUTPUT
# make bench-gpu measures on a GPU, at the size of Llama 3.2 1B, for MINUTES (9) at a time; KIT as above
# make bench-eval  runs TruthfulQA by lm-eval and by ours in turn: how far the numbers are apart, and how fast
# make lm-eval  installs lm-eval in an environment of its own, for align eval tax and make bench-eval
# make soak   kills runs and resumes them, and reads mutated input, for hours; the tallies are those of docs/reliability.md
# make docs   builds the documentation site into site/ (open site/index.html); a warning is an error
# make test   the same set-up with the development tools, then the tests
# make test-fast  without those that start a process, a browser or a database, or run a stage: for every save
# make test-full  with those that take minutes or double a check of another test, as in continuous integration
PYTHON ?= python3
MODEL ?= smollm2-135m
SEED ?= 0
OUTPUT ?= $(if $(filter gpu-test,$(MAKECMDGOALS)),runs/gpu,$(if $(filter bench-gpu,$(MAKECMDGOALS)),benchmarks/results,$(if $(filter smollm2-135m,$(MODEL)),runs/demo,runs/demo-$(MODEL))))
VENV := .venv
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
TESTS ?= tests
JOBS ?= 3
ONLY ?=
PAIRS ?= 3
KILLS ?= 30
COUNT ?= 10000
QUESTIONS ?= 50
PEER := .venv-trl-1.12
LM_EVAL := .venv-lm-eval-0.4.13
KIT ?=
WEIGHTS ?= 0
MINUTES ?= 9
ifdef KIT
SITE := $(KIT)/site
GPU_READY := $(SITE)/.done
GPU_PYTHON := ALIGN_CACHE=$(abspath $(KIT)/cache) PYTHONPATH=$(CURDIR):$(abspath $(SITE)) $(PYTHON)
GPU_PEER := $(KIT)/peer-python
else
GPU_READY = $(VENV)/.dev $(PEER)/.done
GPU_PYTHON := $(VENV)/bin/python
GPU_PEER := $(PEER)/bin/python
endif

.PHONY: demo annotate test test-fast test-full lint format docs bench gpu-kit gpu-test bench-gpu bench-eval lm-eval soak clean

demo: $(VENV)/.core
	@$(VENV)/bin/align demo --model $(MODEL) --seed $(SEED) --output_dir $(OUTPUT)

annotate: $(VENV)/.ui
	@$(VENV)/bin/align annotate

test: $(VENV)/.dev
	@$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SLOWEST) $(TESTS)

# Three workers for two cores: many tests wait for a process or a browser. The fast ones never wait.
# Tests start hundreds of processes: each would compile the package again where the environment forbids to keep bytecode.
test test-fast: export PYTHONDONTWRITEBYTECODE :=

test-full: export ALIGN_FULL := 1
test-full: SLOWEST := --durations=25
test-full: test

test-fast: JOBS = 2
test-fast: $(VENV)/.dev
	@$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not slow' $(TESTS)

lint: $(VENV)/.dev
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

format: $(VENV)/.dev
	@$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

docs: $(VENV)/.docs
	@$(VENV)/bin/python docs/write_settings.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

bench: $(VENV)/.core $(PEER)/.done
	@$(VENV)/bin/python -m benchmarks.run --only $(ONLY) --pairs $(PAIRS)

gpu-kit: $(VENV)/.dev
	@$(VENV)/bin/python -m benchmarks.gpu_kit build/gpu-kit --weights $(WEIGHTS)

gpu-test: $(GPU_READY)
	@mkdir -p $(OUTPUT)
	@$(GPU_PYTHON) -m pytest -m gpu tests/gpu -q --session-timeout 570 -p no:cacheprovider --junitxml $(OUTPUT)/gpu-tests.xml

bench-gpu: $(GPU_READY)
	@mkdir -p $(OUTPUT)
	@$(GPU_PYTHON) -m benchmarks.run --scale gpu --only $(ONLY) --pairs $(PAIRS) --ppo_python $(GPU_PEER) --results $(OUTPUT) --minutes $(MINUTES)

# The tree's own packages stay first on the path; what the kit brings stands before what the machine has.
$(KIT)/site/.done: $(wildcard $(KIT)/wheels/*.whl $(KIT)-weights-*)
	@$(PYTHON) -m pip install -qq --no-index --no-deps --no-compile --target $(SITE) $(KIT)/wheels/*.whl
	@$(PYTHON) -m pip install -qq --no-index --no-deps --no-compile --target $(KIT)/peer-site $(KIT)/peer/*.whl
	@printf '#!/bin/sh\nPYTHONPATH=$(abspath $(KIT)/peer-site):$$PYTHONPATH exec $(PYTHON) "$$@"\n' >$(GPU_PEER) && chmod +x $(GPU_PEER)
	@$(GPU_PYTHON) -m benchmarks.gpu_unpack $(KIT) $(wildcard $(KIT)-weights-*) && touch $@

bench-eval: $(VENV)/.core $(LM_EVAL)/.done
	@$(VENV)/bin/python -m benchmarks.eval_parity --python $(LM_EVAL)/bin/python --questions $(QUESTIONS) --pairs $(PAIRS)

lm-eval: $(LM_EVAL)/.done

soak: $(VENV)/.dev
	@$(VENV)/bin/python -m benchmarks.soak --kills $(KILLS) --count $(COUNT) $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) $(PEER) $(LM_EVAL) build dist site *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two)"
	@$(PIP) -e . && touch $@

$(VENV)/.ui: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two)"
	@$(PIP) -e '.[ui]' && touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) with the development tools (a few minutes)"
	@$(PIP) -e '.[ui,serve,clean,deepspeed,dev]' && touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two)"
	@$(PIP) -e '.[docs]' && touch $@

# The peer of PPO needs a TRL older than ours. Its torch comes from where ours does (pip's own settings decide).
$(PEER)/.done: benchmarks/constraints-trl-1.12.txt | $(VENV)/bin/python
	@echo "installing the peer into $(PEER) (a minute or two)"
	@$(PYTHON) -m venv $(PEER)
	@$(PEER)/bin/python -m pip install -qq --disable-pip-version-check -c $< torch && \
	$(PEER)/bin/python -m pip install -qq --disable-pip-version-check -c $< trl==1.12.0 peft pandas rich && touch $@

# lm-eval stays in an environment of its own: nothing of it is imported here.
$(LM_EVAL)/.done: benchmarks/constraints-lm-eval-0.4.13.txt | $(VENV)/bin/python
	@echo "installing lm-eval into $(LM_EVAL) (a minute or two)"
	@$(PYTHON) -m venv $(LM_EVAL)
	@$(LM_EVAL)/bin/python -m pip install -qq --disable-pip-version-check -c $< torch && \
	$(LM_EVAL)/bin/python -m pip install -qq --disable-pip-version-check -c $< 'lm_eval[hf]==0.4.13' && touch $@
