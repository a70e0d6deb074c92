# Claw: every target makes .venv itself when it is missing or out of date.
#   make demo        set up, then train a small model in real sandboxes
#   make test        set up, then all tests but the slow ones
#   make test-slow   the tests that take minutes
#   make check       lint, formatting, types, import directions
#   make help        this list
# Variables: TORCH (the one place that names the torch version), TORCH_BUILD (auto, cpu, cuda), PYTHON, PYTEST, DEMO.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

TORCH ?= torch==2.13.0
TORCH_BUILD ?= auto
PYTHON ?= python3
PYTEST ?=
DEMO ?= experiment=demo

VENV := .venv
BIN := $(VENV)/bin
# The stamp's name carries a checksum of everything the environment is made from.
READY := $(VENV)/ready-$(shell { echo '$(TORCH) $(TORCH_BUILD)'; cat pyproject.toml scripts/set-up scripts/install-torch; } | cksum | tr ' ' '-')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help demo test test-slow check check-lint check-format check-types check-imports fix set-up system models clean

help:
	@sed -n '2,7s/^# \{0,1\}//p' Makefile

set-up: $(READY)
	@:

$(READY):
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' TORCH_BUILD='$(TORCH_BUILD)' scripts/set-up '$(VENV)' '$@'

system:
	@scripts/system-packages

# Small models that the tests use; fetched once into the user's cache.
models: $(READY)
	@$(BIN)/claw fetch smollm2-135m tiny

demo: system $(READY)
	@$(BIN)/claw-train $(DEMO)

test: system models
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST)

test-slow: system models
	@$(BIN)/python -m pytest -m slow $(PYTEST)

check: check-lint check-format check-types check-imports

check-lint: $(READY)
	@echo '== ruff check' && $(BIN)/ruff check .

check-format: $(READY)
	@echo '== ruff format' && $(BIN)/ruff format --check .

check-types: $(READY)
	@echo '== pyright' && $(BIN)/pyright

check-imports: $(READY)
	@echo '== import directions' && $(BIN)/lint-imports --no-logo

fix: $(READY)
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
