# make train and make test are all the set-up there is: each makes the virtual environment it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
WORKERS ?= 2

.PHONY: train test test-all lint facts aim clean help

help:
	@echo "make train   train the debug Llama here (ARGS='key=value ...' adds overrides)"
	@echo "make test    run the tests, two at a time (ARGS='tests/test_loss.py -k ...' selects, WORKERS=0: in one process)"
	@echo "make aim     serve the tracked runs in a browser"
	@echo "make test-all  run the tests and the long walks, which make test leaves out"
	@echo "make lint    check the style, the format and the types"
	@echo "make facts   measure the source, write the figures into docs/architecture.md"

train: $(VENV)/.core
	$(BIN)/python -m titanyaml $(ARGS)

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "long or not long" $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

facts: $(VENV)/.core
	$(BIN)/python docs/make_facts.py

aim: $(VENV)/.core
	test -d outputs/.aim || $(BIN)/aim init --repo outputs
	$(BIN)/aim up --repo outputs

clean:
	rm -rf $(VENV) build src/*.egg-info

$(VENV)/.core: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
