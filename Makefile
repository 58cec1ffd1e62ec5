# Everything a person runs here. `make run` needs python3 (3.11 or newer) with venv, and a package index.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ASK ?= What is 17 * 23?

.PHONY: help run demo local test test-chaos bench bench-quick check contract generate format lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# All make the same folder.
.NOTPARALLEL:

# Two environments share one folder: what running needs, and on top of it what testing needs.
$(VENV)/.run: requirements/run.txt
	@$(PYTHON) requirements/install.py $(VENV) requirements/run.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/run.txt
	@$(PYTHON) requirements/install.py $(VENV) requirements/dev.txt
	@touch $@ $(VENV)/.run

# The local model. Where it cannot be had everything goes on without it, and it is not tried again at every start.
$(VENV)/.local: requirements/local.txt
	@$(PYTHON) requirements/install.py $(VENV) requirements/local.txt
	@touch $@

run: $(VENV)/.run $(VENV)/.local ## engine on 127.0.0.1:50051 and the chat page on http://127.0.0.1:8080; Ctrl-C ends both
	@$(BIN)/python deploy/local.py

demo: $(VENV)/.run $(VENV)/.local ## the same, asks one question (ASK="...") that needs a tool, and ends
	@$(BIN)/python deploy/local.py --ask "$(ASK)"

local: $(VENV)/.run ## installs the local model, or shows why it cannot be had
	@REQUIRE_TOOLCHAINS=1 $(PYTHON) requirements/install.py $(VENV) requirements/local.txt
	@touch $(VENV)/.local

test: $(VENV)/.dev $(VENV)/.local check ## everything a change must pass
	@$(BIN)/python -m pytest

test-chaos: $(VENV)/.dev ## the whole kill sweep and the chaos runs, some 20 minutes; CHAOS="--long --seed 7" for more
	@$(BIN)/python -m pytest tests/chaos --whole $(CHAOS)

bench: $(VENV)/.dev ## every goal of docs/performance.md measured, some 25 minutes; ROWS=1,3 for some of them
	@mkdir -p var/bench
	@$(BIN)/python -m tests.bench $(if $(ROWS),--rows $(ROWS)) --json var/bench/result.json --svg var/bench/result.svg

bench-quick: $(VENV)/.dev ## the same with fewer repetitions, some five minutes
	@mkdir -p var/bench
	@$(BIN)/python -m tests.bench --quick $(if $(ROWS),--rows $(ROWS)) --json var/bench/result.json --svg var/bench/result.svg

check: $(VENV)/.dev contract ## the quick half: protos, generated code, style, types, structure
	@$(BIN)/buf lint
	@$(BIN)/buf format -d --exit-code
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

contract: $(VENV)/.dev ## the contract gate alone: nothing that breaks a reader
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dualclaw contract check --against proto/baseline/v0.1.0.binpb

generate: $(VENV)/.dev ## proto/python from the .proto files
	@$(BIN)/python proto/generate.py

format: $(VENV)/.dev ## puts code and protos in shape
	@$(BIN)/buf format -w
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: $(VENV)/.dev ## renews requirements/*.txt from pyproject.toml
	@$(BIN)/python requirements/lock.py

clean: ## removes what the other commands made
	rm -rf $(VENV) var .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
