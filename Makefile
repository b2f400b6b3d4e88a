# `make help` lists the targets, those first that one needs most. Everything is installed into .venv; nothing outside this folder is changed, except caches.

PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
INSTALL := $(UV) pip install --quiet --python $(BIN)/python
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
COMPILE += $(UPGRADE)
SOURCES := supervisor runtimes tests bench docs tools

# Where this is set, every daemon would compile its 600 modules at its start.
unexport PYTHONDONTWRITEBYTECODE

# Pure and in-process tests: those of developers' tools start programs.
FAST := tests/unit $(addprefix --ignore=tests/unit/,support tools)
# Those without the core and documents, which import nothing of others, and what meets their packages besides: uv, the
# hub's client, forms, the log, a whole daemon.
LOWEST := $(FAST) $(addprefix --ignore=tests/unit/,core docs) \
  $(addprefix tests/installation/test_,accelerator_builds.py compiling.py) tests/e2e/cli/pull/test_pull.py::TestFetching \
  $(addprefix tests/e2e/cli/test_,log.py show.py) $(addprefix tests/e2e/http/test_,errors.py forwarding.py metrics.py multipart.py) \
  tests/e2e/runtimes/test_sdk_server.py $(addprefix tests/security/test_,auth.py exposure.py)

.DEFAULT_GOAL := help
.PHONY: help run status logs restart stop test test-all test-fast fast announced costs runtime-figures lint format check bench bench-gpu simulate tenants golden docs \
  soak llama-server test-llama-cpp test-vllm test-chatterbox test-open-webui lock upgrade release audit licences lowest clean

FIRST := run test-fast test check docs

help: ## List the targets
	@awk -F ':.*## ' -v first="$(FIRST)" ' \
	  BEGIN { count = split(first, names, " "); for (at in names) is_first[names[at]] } \
	  /^[a-z-]+:.*## / { line[$$1] = sprintf("  make %-16s %s", $$1, $$2); if (!($$1 in is_first)) rest = rest "\n" line[$$1] } \
	  END { for (at = 1; at <= count; at++) print line[names[at]]; print rest }' $(MAKEFILE_LIST)

run: .venv/ready ## Serve the demo on 127.0.0.1:8081 (installs what it needs first)
	@exec $(BIN)/llmux serve --demo

status: ## What systemd says of the service (llmux service install)
	systemctl --user --no-pager status llmux.service

logs: ## The service's log as it grows, until Ctrl-C
	journalctl --user --unit llmux.service --lines 100 --follow

restart: ## Restart the service, after its running requests
	systemctl --user restart llmux.service

stop: ## Stop the service and its socket, until the next start or login
	systemctl --user stop 'llmux.s*'

test: announced .venv/ready-dev ## Run the tests side by side, against real workers, but for costly ones that passed as they are
	$(BIN)/python -m tests.support.environments
	$(BIN)/pytest -n auto --skip-unchanged

test-all: announced .venv/ready-dev ## Run all tests, and note which costly ones passed, in tests/passed.json
	$(BIN)/python -m tests.support.environments
	$(BIN)/pytest -n auto --note-passed

test-fast: .venv/ready-dev ## What to run at each save: pure and in-process tests, lint, types; under a minute
	@$(MAKE) --no-print-directory --jobs 2 fast lint

runtime-figures: announced .venv/ready-dev ## Install and load each runtime and note what that takes, in tests/runtimes.json
	$(BIN)/python -m tests.support.runtime_figures

costs: announced .venv/ready-dev ## Run all tests and note what each folder and file costs, in tests/costs.json
	$(BIN)/python -m tests.support.environments
	$(BIN)/pytest -n auto --costs-to=tests/costs.json
	$(BIN)/python -m tools.docs

fast: .venv/ready-dev
	$(BIN)/pytest -q -n auto $(FAST)

announced:
	@$(PYTHON) -m tests.support.to_install

lint: .venv/ready-dev ## Check format, style, types and layers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/ready-dev ## Format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

check: ## What CI runs
	bash .ci/run

bench: .venv/ready-dev ## Compare the data path with nginx and a direct connection
	$(BIN)/python -m bench

simulate: .venv/ready-dev ## Play a day of a large machine through the scheduler, and write docs/scheduling.md anew
	$(BIN)/python -m bench.simulation --write

bench-gpu: .venv/ready-dev ## Measure the installed runtimes on this machine's NVIDIA GPU, and write docs/gpu-results.md anew
	$(BIN)/python -m bench.gpu

tenants: .venv/ready-dev ## Let three clients of different class share four real models, and write their waits into docs/scheduling.md
	$(BIN)/llmux runtimes install llama_server
	$(BIN)/python -m bench.tenants --write

golden: .venv/ready-dev ## Write the golden files anew; read the difference before you commit it
	LLMUX_GOLDEN=update $(BIN)/pytest -q tests/unit/core tests/e2e/cli/test_config_import.py tests/clients/test_request_fields.py
	$(BIN)/python -m tests.support.corpus --write

docs: .venv/ready-dev ## Write anew what the documents take from the code
	$(BIN)/python -m tools.docs

soak: .venv/ready-dev ## Fault, fuzz and property tests with their full counts, and a thousand swaps under load (an hour or two)
	LLMUX_SOAK=1 $(BIN)/pytest -s --timeout=3600 --figures-to=tests/figures.json tests/faults tests/unit $(wildcard tests/security/test_fuzz_*.py)
	$(BIN)/python -m tools.docs

llama-server: .venv/ready ## Compile a real llama-server once, for the tests that compare it with the embedded one
	$(BIN)/python -m tests.support.build_llama_server

test-llama-cpp: .venv/ready-dev ## Compile a real llama-cpp-python once and test its runtime with it
	$(BIN)/python -m tests.support.build_llama_cpp
	$(BIN)/pytest -s tests/e2e/runtimes/test_llama_cpp.py
	$(BIN)/pytest -s tests/contract -k llama_cpp

test-vllm: .venv/ready-dev ## Install a real vLLM for the processor once (3.5 GB) and test its two runtimes with it
	$(BIN)/python -m tests.support.build_vllm
	$(BIN)/pytest -s tests/e2e/runtimes/test_vllm.py tests/e2e/runtimes/test_vllm_worker.py

test-chatterbox: .venv/ready-dev ## Install the real Chatterbox once (1.8 GB) and let it speak
	LLMUX_TEST_CHATTERBOX=1 $(BIN)/pytest -s tests/e2e/runtimes/test_chatterbox.py -k real

test-open-webui: .venv/ready-dev ## Install the real Open WebUI once (2.4 GB), use it in a browser, and take the documentation's pictures
	$(BIN)/python -m tests.support.environments
	$(BIN)/python -m tests.support.build_open_webui
	LLMUX_TEST_OPEN_WEBUI=1 LLMUX_SCREENSHOTS=1 $(BIN)/pytest tests/open_webui

.PHONY: image test-podman
ENGINE ?= podman
IMAGE ?= localhost/llmux
BASE ?= docker.io/library/python:3.13-slim-trixie
PACKAGES ?=

image: ## Build the container image localhost/llmux (deploy/podman); ENGINE=docker, IMAGE, BASE, PACKAGES
	$(ENGINE) build --file deploy/podman/Containerfile --build-arg BASE=$(BASE) --build-arg "PACKAGES=$(PACKAGES)" --tag $(IMAGE) .

test-podman: .venv/ready-dev ## Build the image and use the pod of deploy/podman, without root (needs podman; some minutes)
	$(BIN)/python -m tests.support.environments
	LLMUX_TEST_PODMAN=1 $(BIN)/pytest -n 0 tests/installation/test_podman.py

lock: .venv/ready-dev ## Write the lock files anew; what is pinned stays, unless it can't
	$(COMPILE) pyproject.toml -o requirements.lock
	$(COMPILE) pyproject.toml --group=dev -c requirements.lock -o requirements-dev.lock
	$(COMPILE) requirements-tools.in -c requirements.lock -o requirements-tools.lock
	$(BIN)/python -m tools.lock_runtimes $(UPGRADE)
	$(MAKE) licences

upgrade: ## The same, with the newest versions that are allowed; then look at the difference, and run the tests
	$(MAKE) lock UPGRADE=--upgrade

release: .venv/ready ## Make the files of a release in dist/: wheel, checksums, changes, install script; a person publishes them
	@$(BIN)/python -m tools.release

audit: .venv/ready-dev ## Ask a database for known vulnerabilities of everything that is locked
	@$(BIN)/python -m tools.audit

licences: .venv/ready-dev ## Find out the licences of everything that is locked
	$(BIN)/python -m tools.licences
	$(BIN)/python -m tools.docs

lowest: .venv-lowest/ready ## Run the unit tests with the lowest versions that pyproject.toml allows
	.venv-lowest/bin/pytest -q -n auto $(LOWEST)

clean: ## Remove the environment and caches of this folder
	rm -rf .venv .venv-lowest .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/tools: requirements-tools.lock
	@$(PYTHON) -c 'import sys; sys.exit("llmux needs Python 3.11 or newer, not %d.%d: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Making .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-tools.lock
	@touch $@

.venv/ready: .venv/tools requirements.lock pyproject.toml
	@echo "Installing llmux"
	@$(INSTALL) --require-hashes --compile-bytecode -r requirements.lock
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q supervisor runtimes
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.lock
	@echo "Installing what the tests need"
	@$(INSTALL) --require-hashes -r requirements-dev.lock
	@touch $@

# What developers have, with llmux's own dependencies lowered to where its ranges begin.
.venv-lowest/ready: .venv/tools requirements-dev.lock pyproject.toml
	@echo "Making .venv-lowest"
	@$(UV) venv --quiet --clear --seed --python $(BIN)/python .venv-lowest
	@$(UV) pip install --quiet --python .venv-lowest --require-hashes -r requirements-dev.lock -r requirements-tools.lock
	@$(UV) pip install --quiet --python .venv-lowest --no-deps --no-build-isolation -e .
	@$(UV) pip compile --quiet --resolution lowest-direct --no-deps --no-header pyproject.toml -o .venv-lowest/lowest.txt
	@$(UV) pip install --quiet --python .venv-lowest -r .venv-lowest/lowest.txt
	@$(UV) pip check --quiet --python .venv-lowest
	@touch $@
