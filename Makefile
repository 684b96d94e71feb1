# Needs only python3 (3.10 or newer), pip and make. Every target sets up .venv by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MEMBERS := core backends/torch backends/torch_memory backends/nsys backends/npu backends/precision_debugger
EXAMPLES := $(patsubst %/pyproject.toml,%,$(wildcard examples/backends/*/pyproject.toml))
STAMP := $(VENV)/.stamp
DEV := $(shell sed -n '/^dev = \[/,/^\]/s/^  "\(.*\)",$$/\x22\1\x22/p' pyproject.toml)
SRC := $(addsuffix /src,$(MEMBERS))

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(MEMBERS) $(EXAMPLES))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(addprefix -e ./,$(MEMBERS) $(EXAMPLES)) $(DEV)
	@touch $@

venv: $(STAMP)  ## set up .venv

demo: $(STAMP)  ## a small PPO run on two ranks, profiled by examples/ppo/profile.yaml (TOOL=nsys, ARGS="key=value …")
	@$(BIN)/rankscope demo $(if $(TOOL),--tool $(TOOL)) $(ARGS)

test: $(STAMP)  ## the test suite (ARGS="-k name …")
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SRC)
	$(BIN)/lint-imports

bench: $(STAMP)  ## side-by-side measurements, printed as ratios
	$(BIN)/python bench/run.py $(ARGS)

docs: $(STAMP)  ## regenerate the generated parts of docs/
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
