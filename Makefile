# Needs Python 3.11 or newer with venv and pip; everything else is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin
# Tried in this order; `make test PYTHON=python3.13` names one.
PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3 python
EXPERIMENT ?= jobs/experiments/demo.toml
ARGS ?=

# What .venv holds: the package; with what the tests need; with the linters as well.
HAS_RAYFL := $(VENV)/.has-rayfl
HAS_TEST := $(VENV)/.has-test
HAS_DEV := $(VENV)/.has-dev
SOURCES := pyproject.toml constraints.txt

.PHONY: help demo test hostile lint docs dist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    install, run the demo experiment, print its table and the path of its report"
	@echo "make test    install, run the tests but for slow ones in three processes (ARGS='-n 0 -k word' passes arguments to pytest)"
	@echo "make hostile all wrong inputs of tests/hostile, and long fuzzing of decoders and readers"
	@echo "make lint    ruff and pyright"
	@echo "make docs    build the documentation into site/; it fails on any warning"
	@echo "make dist    build the wheel and the sdist into dist/, and run the demo from the wheel in a fresh environment"
	@echo "make clean   remove .venv and caches; runs/ stays"

demo: $(HAS_RAYFL)
	@$(BIN)/rayfl run $(EXPERIMENT) $(ARGS)

test: $(HAS_TEST)
	@$(if $(ARGS),,echo "The tests take about 10 minutes on two cores; pytest shows the percentage done.")
	@$(BIN)/python -m pytest -n 3 --dist loadfile --max-worker-restart 1 $(ARGS)

hostile: $(HAS_TEST)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m '' tests/hostile $(ARGS)

lint: $(HAS_DEV)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/python -m pyright

# Not --quiet, with which --strict sees no warnings. The variable spares a notice about another project.
docs: $(HAS_DEV)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "documentation: $(CURDIR)/site/index.html"

dist: $(HAS_DEV)
	@.ci/dist $(BIN)/python

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist site
	find rayfl actors jobs benchmarks docs tests -name __pycache__ -type d -prune -exec rm -rf {} +

# install(extras, stamps): the stamps are younger than SOURCES once this has gone through.
define install
	@if [ -e $(HAS_RAYFL) ]; then echo "Bringing $(VENV) up to rayfl$(1), a minute or two."; else \
		echo "Installing rayfl$(1) into $(VENV): pip downloads up to 1.8 GB, most of it torch, in 3 to 10 minutes."; fi
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.$(1)'
	@touch $(2)
endef

$(HAS_RAYFL): $(SOURCES) | $(BIN)/python
	$(call install,,$(HAS_RAYFL))

$(HAS_TEST): $(SOURCES) | $(BIN)/python
	$(call install,[test],$(HAS_RAYFL) $(HAS_TEST))

$(HAS_DEV): $(SOURCES) | $(BIN)/python
	$(call install,[dev],$(HAS_RAYFL) $(HAS_TEST) $(HAS_DEV))

# ensurepip is what a Python without the venv package lacks.
$(BIN)/python:
	@for python in $(PYTHON); do \
		if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			exec $$python -m venv --clear $(VENV); \
		fi; \
	done; \
	echo "rayfl needs Python 3.11 or newer with its venv module, and none of '$(PYTHON)' is one:" \
		"install it (on Debian: apt-get install python3-venv) or name it, as in 'make test PYTHON=python3.12'." >&2; \
	exit 1
