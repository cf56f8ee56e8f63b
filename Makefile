# The menu. Each target sets up what it needs, in any order, from a clean clone.
# Nothing goes outside .venv and build/ but `test-deps` and `slurm-demo`, which install system packages (as root).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
comma := ,
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUNS := $(VENV)/.runs
PYTEST := $(BIN)/python -m pytest -q
PARALLEL ?= 2

.PHONY: help install demo slurm-demo test sky-deps test-quick test-faults test-docker image bench lint schema constraints test-deps clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## .venv with the launcher, PyTorch and the tools of development

# .installing is there from the making of .venv to the end of the first installation: what was interrupted is begun anew.
# $(1): the extras that are installed.
define install-into-venv
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("launcher needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
@if [ -e $(VENV)/.installing ]; then rm -rf $(VENV); fi
@has_pip() { $(BIN)/python -m pip --version >/dev/null 2>&1; }; \
if ! has_pip; then $(PYTHON) -m venv $(VENV); has_pip || $(PYTHON) -m venv --clear $(VENV); touch $(VENV)/.installing; fi
@echo "installing into $(VENV) (PyTorch among it: a few minutes; with its CUDA libraries some GB)"
@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	--config-settings editable_mode=compat -e '.[$(1)]'
@rm -f $(VENV)/.installing
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(call install-into-venv,train$(comma)dev)
	@touch $@ $(RUNS)

# What a run needs, without the tools of development.
$(RUNS): pyproject.toml constraints.txt
	$(call install-into-venv,train)
	@touch $@

demo: install  ## train on handwritten digits, on two nodes (both on this machine)
	$(BIN)/launch recipes/mnist_ddp.yaml --nodes 2 --on local
	@command -v launch >/dev/null || echo "       where there is no \`launch\` yet:  source $(BIN)/activate"

slurm-demo:  ## as root: a real SLURM on this machine, and a run of two nodes on it; asks before it installs packages
	@PYTHON=$(PYTHON) slurm/demo

# Tests that start real processes are not run side by side: on few cores they would only wait for each other.
test: install  ## every test that this machine can run, but for the long ones; the last lines say what it cannot, and why
	@status=0; \
	$(PYTEST) -n $(PARALLEL) -m 'not process and not long' || status=$$?; \
	$(PYTEST) -m 'process and not long' || status=$$?; \
	exit $$status

test-quick: install  ## every test without real processes: unit, golden, contract
	$(PYTEST) -n $(PARALLEL) -m 'not process and not long'

# Among these are the long ones, here and elsewhere, which no other target runs (5: pytest has found none).
test-faults: install  ## tests that break things on purpose: half an hour; the last lines say what cannot be run, and why
	@status=0; \
	$(PYTEST) tests/faults || status=$$?; \
	$(PYTEST) -m long --ignore=tests/faults || { long=$$?; [ $$long -eq 5 ] || status=$$long; }; \
	exit $$status

sky-deps:  ## SkyPilot in an environment of its own (460 MB), whose loader the tests of --on sky ask
	@[ -x build/sky/bin/sky ] || { $(PYTHON) -m venv build/sky && build/sky/bin/pip install --quiet 'skypilot==0.14.1'; }

test-docker: install  ## as root: a real Docker engine, the image, runs in containers; fails where no engine can be started
	LAUNCH_TEST_REQUIRE=docker $(PYTEST) tests/docker

# TARGET=cuda for GPUs; BUILD_OPTIONS: proxy, index, authorities ... (docs/docker.md).
TARGET ?= cpu
image:  ## the image launcher:cpu (TARGET=cuda: launcher:cuda) by docker/Dockerfile; needs Docker, and nothing of .venv
	DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile --target $(TARGET) --tag launcher:$(TARGET) \
		--build-arg VERSION="$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" \
		--build-arg REVISION="$$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)" \
		--build-arg CREATED="$$(git log -1 --format=%cI 2>/dev/null || echo unknown)" $(BUILD_OPTIONS) .

bench: install  ## measurements against torchrun; each prints a table
	@for script in $$(grep -l __main__ tests/bench/*.py); do echo "== $$script"; $(BIN)/python "$$script"; done

lint: install  ## ruff, mypy --strict, the layers of the house, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck .ci/run slurm/demo docker/steps/apt docker/steps/headers docker/steps/pip

schema: install  ## write the JSON Schemas of recipes and profiles, and docs/recipes.md, after a change of the recipe
	$(BIN)/python -m launcher.recipe.jsonschema
	$(BIN)/python -m launcher.recipe.reference

constraints:  ## write constraints.txt anew: the newest versions of everything but torch
	@rm -rf build/constraints && mkdir -p build/constraints
	@grep '^torch==' constraints.txt > build/constraints/torch.txt
	$(PYTHON) -m venv build/constraints/venv
	build/constraints/venv/bin/pip install --quiet -c build/constraints/torch.txt -e '.[train,dev]'
	@{ grep '^#' constraints.txt; \
	build/constraints/venv/bin/pip freeze --exclude-editable --exclude setuptools | sed 's/+cpu$$//'; \
	} > build/constraints/constraints.txt
	@mv build/constraints/constraints.txt constraints.txt && rm -rf build/constraints

test-deps:  ## as root: the system packages that tests need, if they are missing
	@missing=""; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	command -v ssh >/dev/null || missing="$$missing openssh-client"; \
	[ -x /usr/sbin/sshd ] || missing="$$missing openssh-server"; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	if docker=$$($(PYTHON) tests/contract/engine_packages.py); then missing="$$missing $$docker"; fi; \
	if slurm=$$($(PYTHON) slurm/cluster check); then missing="$$missing $$slurm"; fi; \
	missing=$$(echo $$missing); \
	if [ -z "$$missing" ]; then echo "test-deps: nothing is missing"; \
	elif [ "$$(id -u)" -ne 0 ]; then echo "test-deps: missing: $$missing (run it as root to install)"; \
	else apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing; fi

clean:  ## remove .venv, build/ and caches; runs are kept
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find launcher jobs tests -name __pycache__ -type d -prune -exec rm -rf {} +
