# Colonnade's commands. Each makes .venv and installs what it needs, once: a stamp in .venv is keyed by the
# text of pyproject.toml and assets.txt, so a second run starts at once. GNU make 3.81 or newer.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 3
ARGS    ?=
CHOSEN  ?= not long and not slow

BIN := $(VENV)/bin
KEY := $(shell cat pyproject.toml assets.txt | cksum | tr -cd '0-9')
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SCRIPTS := $(filter-out benchmarks/table.py,$(sort $(wildcard benchmarks/*.py)))

# Three test workers for two cores, because tests wait for other processes a third of the time. No worker may start a
# thread per core; no test may use the network. Tests start hundreds of processes: they keep compiled modules in
# __pycache__, even if the environment says otherwise.
QUIET := PYTHONDONTWRITEBYTECODE= NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# $(call with-uv,PYTHON,ARGUMENTS): installs packages with uv, in a fraction of pip's CPU time: it downloads in parallel and
# leaves compiling to the first import. uv gets pip's settings, except for extra indexes: of equal versions it takes the
# first index's wheel, even if that lacks a library that another index's wheel has. Where uv fails, pip tries.
PIP_SETTINGS := index-url=UV_DEFAULT_INDEX find-links=UV_FIND_LINKS constraint=UV_CONSTRAINT cert=SSL_CERT_FILE
with-uv = { { \
	eval "$$($(1) -m pip config list | sed -n '$(foreach it,$(PIP_SETTINGS),s/^[^.]*\.$(subst =,=/export ,$(it))=/p;)')" && \
	$(1) -m uv pip install --quiet --index-strategy unsafe-best-match --python $(1) $(2); } || { \
	echo "  uv failed; installing with pip" && $(1) -m pip --disable-pip-version-check --quiet install $(2); }; }

# $(call step,NAME,COMMAND): runs COMMAND and prints its duration.
step = @started=$$(date +%s); if $(2); then echo "  $(1): $$(( $$(date +%s) - started )) s"; \
	else echo "  $(1): failed after $$(( $$(date +%s) - started )) s" >&2; exit 1; fi

.PHONY: help install demo test test-all lint format pytest clients viewer docs bench clean distclean
.DEFAULT_GOAL := help

help:  ## this list
	@echo "Colonnade: make TARGET [PYTHON=python3.12] [WORKERS=3] [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'

install: $(VENV)/.test-$(KEY)  ## all packages for tests, documentation and benchmarks

demo: $(VENV)/.demo-$(KEY)  ## text in, a model trained on two processes, saved, loaded, served and queried
	@$(BIN)/colonnade demo $(ARGS)

# Both run to their end, even if one fails.
test: $(VENV)/.test-$(KEY)  ## what continuous integration runs: lint, types, import order, tests
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint pytest

lint: $(VENV)/.test-$(KEY)  ## format and lint (ruff), types (pyrefly), import order (import-linter)
	$(call step,ruff format,$(BIN)/ruff format --check --quiet .)
	$(call step,ruff check,$(BIN)/ruff check --quiet .)
	$(call step,pyrefly,$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none)
	$(call step,import order,$(BIN)/lint-imports --no-logo)

test-all: $(VENV)/.test-$(KEY)  ## test, with the slow tests: more than an hour on two cores
	@$(MAKE) --no-print-directory test CHOSEN="not long"

pytest: $(VENV)/.test-$(KEY)  ## only the tests; ARGS="tests/unit -k axis" narrows them, CHOSEN=long takes those of minutes
	$(call step,pytest,$(QUIET) VENV=$(VENV) WORKERS=$(WORKERS) tests/run.sh -m "$(CHOSEN)" $(ARGS))

clients: .venv-clients/.ready-$(KEY)  ## the tests with lm-eval, litellm and guidellm, in an environment of their own
	$(call step,clients,$(QUIET) .venv-clients/bin/python -m pytest $(ARGS) tests/clients)

format: $(VENV)/.test-$(KEY)  ## format the code and apply safe lint fixes
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --fix --quiet .

viewer:  ## check, test and build the matrix viewer into colonnade/look/static; needs node and npm
	@cd viewer && npm ci --no-audit --no-fund --silent && npm run --silent check && npm test --silent && npm run --silent build

docs: $(VENV)/.docs-$(KEY)  ## the documentation, into site/; a broken link or name fails
	$(call step,mkdocs,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet)
	@echo "  open site/index.html"

bench: $(VENV)/.test-$(KEY)  ## all benchmarks that this machine can run, then the results tables
	@for script in $(SCRIPTS); do echo "$$script"; $(BIN)/python $$script $(ARGS) || exit 1; done
	@$(BIN)/python benchmarks/table.py

clean:  ## remove caches and built files; keeps .venv and runs
	@rm -rf site dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	@rm -rf $(VENV) .venv-clients

# Packages per target. A stamp is touched last, so an interrupted installation starts again.
$(VENV)/.base-$(KEY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "  making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1' uv
	@rm -f $(VENV)/.base-* $(VENV)/.demo-* $(VENV)/.docs-* $(VENV)/.test-*
	@touch $@

$(VENV)/.demo-$(KEY): $(VENV)/.base-$(KEY)
	@echo "  installing the demo's packages (a few minutes the first time)"
	$(call step,install,$(call with-uv,$(BIN)/python,--editable '.[serve$(COMMA)gguf]' --group demo) && $(call with-uv,$(BIN)/python,--no-deps -r assets.txt))
	@touch $@

$(VENV)/.docs-$(KEY): $(VENV)/.base-$(KEY)
	@echo "  installing the documentation's packages"
	$(call step,install,$(call with-uv,$(BIN)/python,--group docs))
	@touch $@

$(VENV)/.test-$(KEY): $(VENV)/.base-$(KEY)
	@echo "  installing all packages of the tests (a few minutes the first time)"
	$(call step,install,$(call with-uv,$(BIN)/python,--editable '.[serve$(COMMA)hub$(COMMA)gguf$(COMMA)track$(COMMA)trace]' --group test --group docs) && $(call with-uv,$(BIN)/python,--no-deps -r assets.txt))
	@touch $@ $(VENV)/.demo-$(KEY) $(VENV)/.docs-$(KEY)

.venv-clients/.ready-$(KEY):
	@echo "  making .venv-clients (a few minutes)"
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/python -m pip install --quiet --upgrade 'pip>=25.1' uv
	$(call step,install,$(call with-uv,.venv-clients/bin/python,--editable '.[serve$(COMMA)hub]' --group clients))
	@touch $@

COMMA := ,
