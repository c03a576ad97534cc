# Two commands do everything on a fresh machine; each makes .venv first when it is missing.
#
#   make reproduce            all figures, into figures/        (QUICK=1: smaller inputs, into figures/quick; JOBS=2: two at a time; OUT=folder)
#   make test                 the tests, without those that are slow or need a browser or a GPU (WORKERS=2: two at a time)
#
# More: make test-all | lint | lab.  Another interpreter: make test PYTHON=python3.12.  Another environment: VENV=path

VENV   ?= .venv
PYTHON ?= python3
QUICK  ?=
JOBS   ?= 1
WORKERS ?= 0
OUT    ?=

RUN  := $(VENV)/bin/python -m
# Stamps are written last, so an environment that is half made does not count as made.
BASE := $(VENV)/.wqlab-base
TEST := $(VENV)/.wqlab-test
HALF := $(VENV)/.wqlab-unfinished

.PHONY: help reproduce test test-all lint lab

help:
	@sed -n 's/^#  *//p;/^$$/q' Makefile

reproduce: $(BASE)
	$(VENV)/bin/wqlab reproduce --jobs $(JOBS) $(if $(filter-out 0,$(QUICK)),--quick) $(if $(OUT),--out $(OUT))

test: $(TEST)
	$(RUN) pytest -n $(WORKERS) --dist worksteal -m "not slow and not browser and not gpu"

test-all: $(TEST)
	$(RUN) pytest

lint: $(TEST)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/lint-imports
	$(RUN) mypy
	$(RUN) deptry .

lab: $(BASE)
	$(VENV)/bin/wqlab lab

# Debian's python3 may come without ensurepip; then its own pip puts one into the environment.
# Only what is an environment already is ever cleared.
define make_venv
@$(RUN) pip --version >/dev/null 2>&1 || { \
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("wqlab needs Python 3.11 or newer; $(PYTHON) is " \
		+ sys.version.split()[0] + ". Name another one: make $(MAKECMDGOALS) PYTHON=python3.11")' || exit 1; \
	clear=; test ! -f $(VENV)/pyvenv.cfg || clear=--clear; \
	echo "making $(VENV) with $$($(PYTHON) --version)"; \
	if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $$clear $(VENV); \
	else $(PYTHON) -m venv --without-pip $$clear $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install pip; fi; }
endef

# An install that was killed leaves $(HALF) behind; the next one then trusts nothing that is already there.
define install
@again=; test ! -f $(HALF) || again=--ignore-installed; touch $(HALF); \
	echo "installing wqlab$(1) into $(VENV): 2 to 4 minutes and 2 to 3 GB the first time"; \
	$(RUN) pip install --quiet $$again -c constraints.txt -e '.$(1)'
@rm $(HALF) && touch $@
endef

$(BASE): pyproject.toml constraints.txt
	$(make_venv)
	$(call install,)

$(TEST): pyproject.toml constraints.txt
	$(make_venv)
	$(call install,[test])
	@touch $(BASE)
