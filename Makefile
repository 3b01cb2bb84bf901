# Every target works on a fresh machine: it first makes a virtual environment with the package in it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= $(PYTHON)
READY := $(VENV)/.ready
# Python keeps compiled modules. Otherwise every process compiles them again: 2 s for torch alone.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

# This pip takes half the time of Python 3.11's to choose files. Two processes unpack the packages.
# Builds of torch for CUDA need more packages, and pin another Triton than the tests use.
$(READY): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip==26.3
	sort -r requirements.lock | tr '\n' '\0' | xargs -0 -n 12 -P 2 $(PIP) --no-deps
	@$(BIN)/python -c 'import torch' 2> /dev/null \
	  || { echo 'installing the libraries that torch needs (some gigabytes)' \
	  && grep -v '^triton=' requirements.lock | $(PIP) -r /dev/stdin \
	  && grep '^triton=' requirements.lock | $(PIP) --no-deps -r /dev/stdin; }
	PYTHONWARNINGS=ignore $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

run: $(READY)  ## run ten prompts with the default model and show the scheduler's decisions
	@$(BIN)/headway run

demo: $(READY)  ## compare static with continuous batching, and all presets, in the simulator
	@$(BIN)/headway compare --demo

test:  ## all checks and all tests
	@$(MAKE) --no-print-directory --jobs 3 $(READY) browser packages
	@$(MAKE) --no-print-directory --jobs 2 check pytest

tests: $(READY) browser packages  ## all tests
	@$(MAKE) --no-print-directory pytest

# Three processes for two cores: many tests wait for servers, timers and browsers. They are forks of
# one process, which imports and collects everything: see tests/support/forked_workers.py. CUDA does
# not work in forks.
WORKERS := $(if $(shell command -v nvidia-smi),-n 3 --dist worksteal,--forks 3)
pytest: $(READY)
	@$(BIN)/python -c 'from headway.model.registry import resolve; resolve("smollm2-135m")'
	$(BIN)/python -m pytest $(WORKERS)

# Debian's Chromium, for the tests of the lab page. Only root can install it.
INSTALL := apt-get install -y -qq --no-install-recommends
browser:
	@command -v chromium-headless-shell > /dev/null || command -v chromium > /dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq \
	  && { $(INSTALL) chromium-headless-shell > /dev/null || $(INSTALL) chromium > /dev/null; }; } \
	  || echo "chromium is not installed: the tests of the lab page are SKIPPED" >&2

# The packages that build the lab page, once for each package-lock.json.
PACKAGES := lab-page/node_modules/.ready
NPM_CI := npm ci --no-audit --no-fund --ignore-scripts --fetch-retries 1 --fetch-timeout 15000

packages:
	@{ test $(PACKAGES) -nt lab-page/package-lock.json || { cd lab-page && $(NPM_CI) > /dev/null 2>&1 \
	  && touch ../$(PACKAGES); }; } \
	  || echo "npm or its registry is not available: the build of the lab page is NOT TESTED" >&2

RUNS ?= 12

soak: $(READY) browser packages  ## all tests RUNS=12 times, in random order, half of the runs under load
	@$(BIN)/python -c 'from headway.model.registry import resolve; resolve("smollm2-135m")'
	$(BIN)/python tests/soak/soak.py --runs $(RUNS) $(OPTIONS)

# Folders whose tests need no model weights, no kernels and no server.
FAST := tests/kv tests/scheduler tests/engine tests/record tests/observe tests/lab \
  tests/text tests/project/test_imports.py tests/project/test_vocabulary.py $(wildcard tests/test_*.py)

test-fast: $(READY)  ## scheduler, engine and simulator only, in about a minute
	$(BIN)/python -m pytest --forks 2 -m "not slow" $(FAST)

CLIENTS := .venv-clients

$(CLIENTS)/.ready: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

test-clients: $(READY) $(CLIENTS)/.ready  ## test the server with other Python and Node clients; needs npm
	@$(BIN)/headway models --fetch smollm2-135m --json > /dev/null
	$(BIN)/python -m pytest tests/clients/test_node.py
	LITELLM_LOCAL_MODEL_COST_MAP=True $(CLIENTS)/bin/python -m pytest -W ignore \
	  --confcutdir tests/clients tests/clients/test_python.py

MUTATION := .venv-mutate
SAMPLE ?= 200

$(MUTATION)/.ready: tests/mutation/requirements.txt
	$(PYTHON) -m venv $(MUTATION)
	$(MUTATION)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

mutate: $(MUTATION)/.ready  ## change the scheduler in SAMPLE=200 ways; a test must fail each time; takes 15 minutes
	$(MUTATION)/bin/python tests/mutation/mutate.py --sample $(SAMPLE) $(OPTIONS)

test-gemma: $(READY)  ## compare gemma3-270m with transformers; downloads 238 MB
	HEADWAY_TEST_GEMMA=1 $(BIN)/python -m pytest tests/end_to_end/test_gemma_weights.py

test-deploy: $(READY)  ## the fleet on Ray, also from a config file and updated by `headway deploy`
	HEADWAY_TEST_DEPLOY=1 $(BIN)/python -m pytest tests/fleet/test_ray.py tests/fleet/test_ray_config.py tests/fleet/test_ray_ranks.py

test-gpu:  ## kernels, executor and commands on a GPU; GPU_PYTHON names a Python with CUDA torch and pytest
	@$(GPU_PYTHON) -c "import torch; exit(0 if torch.cuda.is_available() else 'torch finds no GPU')"
	$(GPU_PYTHON) -m pytest -rs -W ignore tests/executor tests/model/kernels tests/model/test_attention_adapters.py \
	  tests/model/test_deterministic.py tests/model/test_fp8.py tests/model/test_streams.py tests/parallel/test_gpu_passes.py \
	  tests/end_to_end/test_gpu_real.py tests/end_to_end/test_gpu_commands.py

# One target for each tool and file, so that --jobs runs them in parallel. test_kernels_compiled
# launches no kernel.
KERNEL_TESTS := $(filter-out test_kernels_compiled,$(notdir $(basename $(wildcard tests/model/kernels/test_*.py))))
# Triton's concurrency sanitizer knows barriers between groups of warps; racecheck does not. It takes
# a minute to compile a kernel with it, so it runs only some of the tests.
HOPPER_TESTS := test_kernels_prefill_hopper
SANITIZED := $(KERNEL_TESTS:%=memcheck-%) $(patsubst %,racecheck-%,$(filter-out $(HOPPER_TESTS),$(KERNEL_TESTS)))
CONCURRENT := kernel_is_right and short and dtype0 and (16 or 256) or every_group and 7 or share and 2 or whose_rows

sanitize: $(SANITIZED) consan  ## memory errors and races in the GPU kernels, with several tools; takes minutes

consan:
	TRITON_INSTRUMENTATION_MODE=consan $(GPU_PYTHON) -m pytest -q -W ignore \
	  -k '$(CONCURRENT)' $(HOPPER_TESTS:%=tests/model/kernels/%.py)

$(SANITIZED):
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \
	  --tool $(firstword $(subst -, ,$@)) \
	  $(GPU_PYTHON) -m pytest -q -W ignore tests/model/kernels/$(lastword $(subst -, ,$@)).py

check: $(READY)  ## formatting, lint and types
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary

format: $(READY)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## cost of the scheduler, quality of its decisions, and speed of the model
	$(BIN)/python -m bench.scheduler.step
	$(BIN)/python -m bench.scheduler.quality
	$(BIN)/python -m bench.cpu.compare --skip-peers

picture: $(READY) browser  ## make the pictures of the documents: `make run`, the lab page, plots
	$(BIN)/python docs/images/picture.py
	$(BIN)/python docs/images/lab.py
	$(BIN)/python docs/images/plots.py

page:  ## build the lab page from lab-page/; needs npm
	cd lab-page && $(NPM_CI) && touch ../$(PACKAGES)
	cd lab-page && npx tsc --noEmit && node build.mjs

dist: $(READY)  ## build a wheel and an sdist in dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build --outdir dist

clean:  ## remove environments, caches and build output
	rm -rf $(VENV) $(CLIENTS) $(MUTATION) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help run demo test browser packages tests pytest soak test-fast test-clients mutate test-deploy test-gemma test-gpu sanitize $(SANITIZED) consan check format bench \
  picture page dist clean
