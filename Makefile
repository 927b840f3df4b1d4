# make quickstart | test | test-unit | lint | bench | venv        Each makes .venv first where it is missing.
VENV := .venv
PYTHON_IN_VENV := $(VENV)/bin/python
READY := $(VENV)/.installed

.PHONY: quickstart test test-unit lint bench venv
.DEFAULT_GOAL := test

quickstart: $(READY)
	$(PYTHON_IN_VENV) tools/quickstart.py

test: $(READY)
	$(PYTHON_IN_VENV) -m pytest

test-unit: $(READY)
	$(PYTHON_IN_VENV) -m pytest tests/style tests/unit

lint: $(READY)
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m mypy
	$(PYTHON_IN_VENV) -m pytest tests/style

bench: $(READY)
	$(PYTHON_IN_VENV) -m bench.pretrain

venv: $(READY)

$(READY): setup.py constraints.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)
	touch $@
