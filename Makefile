# Everything is installed into .venv; nothing else on the machine is touched.
# Works with GNU make from 3.81 (macOS) on. ARGS="..." is handed to what a target runs.

VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo-installed
CHECK := $(VENV)/.check-installed
TEST := $(VENV)/.test-installed
DEV := $(VENV)/.dev-installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP_INSTALL) -c constraints.txt

# `make PYTHON=/path/to/python` chooses one; else it is the first on PATH that is new enough.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 10))'
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)

CELLS := .venv-matrix

# Without the tests beside it, which are not typed, as no test is.
SIMULATION := $(filter-out %/__main__.py,$(wildcard tests/simulation/[!t]*.py))

# Test processes: half of what tests do is waiting, so there are two for each core.
JOBS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Before anything is installed, so that nobody wonders.
ifneq ($(filter test,$(MAKECMDGOALS)),)
ifeq ($(ARGS),)
$(info Tests: about nine minutes on two cores, and one to install what they need the first time.)
endif
endif

# Python files that differ from the last commit, or are new.
CHANGED = $(shell git diff --name-only --diff-filter=d HEAD -- celery_redlock 2>/dev/null | grep '\.py$$'; \
	git ls-files --others --exclude-standard -- celery_redlock 2>/dev/null | grep '\.py$$')

.PHONY: help demo check test test-all lint docs compare bench proof nemesis matrix build clean

help: ## Show this help
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Takes the developers' .venv where there is one, and a lean one otherwise.
demo: $(if $(wildcard $(DEV)),$(DEV),$(DEMO)) ## See tasks under a lock, and nodes failing beneath them
	$(BIN)/celery-redlock demo $(ARGS)

# Takes the developers' .venv where there is one, as `demo` does.
check: $(if $(wildcard $(DEV)),$(DEV),$(CHECK)) ## Check a change in 1.5 minutes: lint, unit and contract tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CHANGED),$(BIN)/mypy --strict --follow-imports=silent $(CHANGED))
	$(BIN)/lint-imports
	$(PYTEST) $(if $(ARGS),$(ARGS),-m "not long" tests/unit tests/contract)

# Takes the developers' .venv where there is one, as `demo` does.
test: $(if $(wildcard $(DEV)),$(DEV),$(TEST)) ## Run the tests, on servers that it brings along; nine minutes on two cores
	$(PYTEST) -m "not long" $(ARGS)

test-all: $(DEV) ## Run these and those that take long or test our own tools; thirty-five minutes
	$(PYTEST) --durations=20 $(ARGS)

SCHEMA := $(BIN)/check-jsonschema --builtin-schema vendor.

lint: $(DEV) ## Check style, types, layers, spelling, prose and workflows
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict celery_redlock tests/support tests/conftest.py
	MYPYPATH=tests $(BIN)/mypy --strict $(SIMULATION)
	@for file in $(wildcard tests/typing/*.py); do (set -x; $(BIN)/mypy --strict $$file) || exit 1; done
	$(BIN)/lint-imports
	$(BIN)/codespell
	PYTHONPATH=tests $(BIN)/python -m support.prose
	$(SCHEMA)github-workflows $(wildcard .github/workflows/*.yml)
	$(SCHEMA)dependabot .github/dependabot.yml
	$(SCHEMA)github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA)github-issue-config .github/ISSUE_TEMPLATE/config.yml

docs: $(DEV) ## Build the pages into build/docs; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs build/docs $(ARGS)

compare: $(DEV) ## Do to other libraries' tasks and to ours what production does; ARGS=--record
	PYTHONPATH=tests $(BIN)/python -m benchmarks.peers $(ARGS)

bench: $(DEV) ## Measure what locks cost; ARGS="publish --rounds 5", ARGS=--record for the docs
	PYTHONPATH=tests $(BIN)/python -m benchmarks $(ARGS)

proof: $(DEV) ## Prove the guarantee: hours of simulated faults; ARGS=simulation, ARGS=--record
	PYTHONPATH=tests $(BIN)/python -m proof $(ARGS)

nemesis: $(DEV) ## Break real servers and workers for ten minutes per fault; ARGS="-- --minutes 1"
	PYTHONPATH=tests $(BIN)/python -m proof nemesis $(ARGS)

matrix: $(DEV) ## Run tests with every Python, Celery, redis-py supported; ARGS=--all, ARGS=--record
	$(BIN)/python -m compatibility $(ARGS)

# No date from outside: all files get hatchling's own, so that everybody's archives are the same.
build: $(DEV) ## Build the source archive and the wheel into dist/, the same bytes everywhere
	rm -rf dist
	env -u SOURCE_DATE_EPOCH $(BIN)/python -m hatchling build
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove everything that can be made again
	rm -rf $(VENV) $(CELLS) build dist
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[demo]'
	@touch $@

$(CHECK): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[check]'
	@touch $@

$(TEST): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[acceptance,check]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@

$(BIN)/python:
	@$(or $(PYTHON),false) $(NEW_ENOUGH) || { echo >&2 "celery-redlock needs Python 3.10 or newer:" \
	  "$(if $(PYTHON),$(PYTHON) is not,there is none on PATH). Name one: make PYTHON=/path/to/python3.12"; \
	  exit 1; }
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
