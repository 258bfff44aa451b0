# Everything is installed into .venv; nothing else on the machine is touched.
# Works with GNU make from 3.81 (macOS) on. ARGS="..." is handed to what a target runs.

VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo-installed
DEV := $(VENV)/.dev-installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP_INSTALL) -c constraints.txt

# `make PYTHON=/path/to/python` chooses one; else it is the first on PATH that is new enough.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 10))'
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11 python3.10; do \
	$$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)

# Of `make matrix`: each Python with each redis-py, then each Celery on $(PYTHON)
PYTHONS ?= 3.10 3.11 3.12 3.13
REDIS_PYS ?= 6.4 7 8
CELERYS ?= 5.4 5.5 5.6 5.7
CELLS := .venv-matrix
# Not those about the demo, the pages and the example: they say nothing about Celery.
ACCEPTANCE := $(filter-out %/test_demo.py %/test_readme.py %/test_benchmarks.py \
	%/test_compare.py %/test_docs.py %/test_pages.py %/test_example_worker.py,$(sort $(wildcard tests/acceptance/test_*.py)))

# Without the tests beside it, which are not typed, as no test is.
SIMULATION := $(filter-out %/__main__.py,$(wildcard tests/simulation/[!t]*.py))

.PHONY: help demo test lint docs compare bench proof nemesis matrix matrix-redis matrix-celery build clean

help: ## Show this help
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Takes the developers' .venv where there is one, and a lean one otherwise.
demo: $(if $(wildcard $(DEV)),$(DEV),$(DEMO)) ## See tasks under a lock, and nodes failing beneath them
	$(BIN)/celery-redlock demo $(ARGS)

test: $(DEV) ## Run all tests, on servers that it brings along
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV) ## Check style, types, layers and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict celery_redlock tests/support tests/conftest.py
	MYPYPATH=tests $(BIN)/mypy --strict $(SIMULATION)
	@for file in $(wildcard tests/typing/*.py); do (set -x; $(BIN)/mypy --strict $$file) || exit 1; done
	$(BIN)/lint-imports
	$(BIN)/codespell

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

matrix: matrix-redis matrix-celery ## Run tests with every Python, redis-py and Celery supported

matrix-redis: $(CELLS)/without-redis.txt
	@for py in $(PYTHONS); do \
	  python$$py -c '' 2>/dev/null || { echo "== python$$py: not on PATH, skipped"; continue; }; \
	  cell=$(CELLS)/$$py; test -x $$cell/bin/python || python$$py -m venv $$cell || exit 1; \
	  for redis in $(REDIS_PYS); do \
	    echo "== python$$py with redis-py $$redis"; \
	    $$cell/bin/python $(PIP_INSTALL) -c $< -e '.[test]' "redis==$$redis.*" || exit 1; \
	    $$cell/bin/python -m pytest -q tests/contract $(ARGS) || exit 1; \
	  done; \
	done

# Each Celery with the kombu of its own time: left to itself, pip takes the newest.
matrix-celery: $(CELLS)/without-celery-kombu.txt
	@for celery in $(CELERYS); do \
	  cell=$(CELLS)/celery-$$celery; test -x $$cell/bin/python || $(PYTHON) -m venv $$cell || exit 1; \
	  echo "== Celery $$celery and kombu $$celery with $$($$cell/bin/python -V)"; \
	  $$cell/bin/python $(PIP_INSTALL) -c $< -e '.[acceptance]' \
	    "celery==$$celery.*" "kombu==$$celery.*" || exit 1; \
	  $$cell/bin/python -m pytest -q tests/contract $(ACCEPTANCE) $(ARGS) || exit 1; \
	done

# What the cells are about is not pinned in them.
$(CELLS)/without-%.txt: constraints.txt
	@mkdir -p $(CELLS) && grep -vE '^($(subst -,|,$*))==' $< > $@

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

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@

$(BIN)/python:
	@$(or $(PYTHON),false) $(NEW_ENOUGH) || { echo >&2 "celery-redlock needs Python 3.10 or newer:" \
	  "$(if $(PYTHON),$(PYTHON) is not,there is none on PATH). Name one: make PYTHON=/path/to/python3.12"; \
	  exit 1; }
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
