# Needs only python3 (3.10 or newer), pip and make. Every target sets up .venv by itself.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
MEMBERS := core backends/torch backends/torch_memory backends/nsys backends/npu backends/precision_debugger integrations/verl
EXAMPLES := $(patsubst %/pyproject.toml,%,$(wildcard examples/backends/*/pyproject.toml))
STAMP := $(VENV)/.stamp
DEV := $(shell sed -n '/^dev = \[/,/^\]/s/^  "\(.*\)",$$/\x22\1\x22/p' pyproject.toml)
SITE := $(shell sed -n '/^site = \[/,/^\]/s/^  "\(.*\)",$$/\x22\1\x22/p' pyproject.toml)
SRC := $(addsuffix /src,$(MEMBERS))

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench docs site dist clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(MEMBERS) $(EXAMPLES))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(addprefix -e ./,$(MEMBERS) $(EXAMPLES)) $(DEV)
	@touch $@

venv: $(STAMP)  ## set up .venv

demo: $(STAMP)  ## a small PPO run on two ranks, profiled by examples/ppo/profile.yaml (ENGINE=ray, TOOL=nsys, ARGS="key=value …")
	@$(BIN)/rankscope demo $(if $(ENGINE),--engine $(ENGINE)) $(if $(TOOL),--tool $(TOOL)) $(ARGS)

test: $(STAMP)  ## the test suite (ARGS="-k name …", JOBS=2)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# torch_npu has wheels up to Python 3.11, and beside it 'import torch' needs CANN: so an environment of its own.
NPU_VENV ?= .venv-npu
NPU_MEMBERS := core backends/torch backends/torch_memory backends/npu
NPU_STAMP := $(NPU_VENV)/.stamp

$(NPU_STAMP): constraints.txt $(addsuffix /pyproject.toml,$(NPU_MEMBERS))
	@test -x $(NPU_VENV)/bin/python || $(PYTHON) -m venv $(NPU_VENV)
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  torch torch-npu==2.13.0 numpy pyyaml 'pytest>=8.2' 'pytest-timeout>=2.3' $(addprefix -e ./,$(NPU_MEMBERS))
	@touch $@

.PHONY: test-npu run-test-npu
test-npu:  ## the real torch_npu on a CPU, over stand-ins for CANN (ARGS="-k name …")
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
	  $(MAKE) --no-print-directory run-test-npu; \
	else echo "test-npu: skipped, for torch_npu has no wheels for $$($(PYTHON) --version), only up to 3.11"; fi

run-test-npu: $(NPU_STAMP)
	@stand_ins=$$($(NPU_VENV)/bin/python tests/npu/cann_stub.py $(NPU_VENV)/cann-stub) && eval "$$stand_ins" && \
	  TEST_NPU_REQUIRED=1 $(NPU_VENV)/bin/python -m pytest tests/npu $(ARGS)

# verl pins versions of its own, and rankscope in it would change what `make bench` compares with.
VERL_VENV ?= .venv-verl-test
VERL_MEMBERS := core backends/torch backends/torch_memory backends/nsys backends/npu backends/precision_debugger integrations/verl
VERL_STAMP := $(VERL_VENV)/.stamp

$(VERL_STAMP): $(STAMP) constraints.txt tests/verl/requirements.txt tests/verl/environment.py \
    bench/verl_env.py $(addsuffix /pyproject.toml,$(VERL_MEMBERS))
	$(BIN)/python tests/verl/environment.py $(VERL_VENV) $(VERL_MEMBERS)
	@touch $@

.PHONY: test-verl
test-verl: $(VERL_STAMP)  ## rankscope inside the real verl on a CPU (ARGS="-k name …")
	$(VERL_VENV)/bin/python -m pytest tests/verl $(ARGS)

lint: $(STAMP)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SRC)
	$(BIN)/lint-imports
	$(BIN)/python release/members.py --check

bench: $(STAMP)  ## side-by-side measurements, printed as ratios
	$(BIN)/python bench/run.py $(ARGS)

docs: $(STAMP)  ## regenerate the generated parts of docs/
	$(BIN)/python docs/generate.py

site: $(STAMP)  ## the guide as a site, in site/; anything odd in it is an error
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

dist: $(STAMP)  ## wheels and source archives of all distributions, in dist/
	@for member in $(MEMBERS); do $(BIN)/python -m build --no-isolation --outdir dist $$member || exit 1; done
	@ls dist

clean:
	rm -rf $(VENV) $(NPU_VENV) $(VERL_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
