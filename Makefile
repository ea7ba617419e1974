# `make demo` and `make test` need python3 >= 3.11 with venv and headers, gcc, make and git; each sets itself up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
REPO   ?= .
PYTEST  = $(BIN)/python -m pytest
KERNELS := $(shell find storage compaction node -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
PROTOS  := $(wildcard node/proto/*.proto)

.PHONY: demo test test-slow sim chaos soak check bench dist setup clean help

help:
	@echo "make demo | test | test-slow | sim | chaos | soak | check | bench | dist | clean"

$(VENV)/.ready: pyproject.toml constraints.txt $(KERNELS) $(PROTOS) node/proto/build.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'setuptools>=77' wheel cython grpcio-tools
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[test,check]'
	@touch $@

setup: $(VENV)/.ready

demo: setup
	@$(BIN)/python examples/git_changelog.py --repo "$(REPO)"
	@$(BIN)/python examples/spark_git_tree.py --repo "$(REPO)" --if-possible

test: setup
	$(PYTEST) -q -m "not slow" -n 2 --dist loadfile

# PySpark (400 MB) and playwright are for the slow tests only; without Java they say that they did not run.
test-slow: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[spark,browser]'
	$(PYTEST) -q -m slow -n 2 --dist loadscope

# Whole clusters under one seed (docs/simulation.md). SEEDS= so many of each stage; MINUTES= for so long.
sim: setup
ifdef MINUTES
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --minutes $(MINUTES)
else ifdef SEEDS
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --seeds $(SEEDS)
else
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage scripted --seeds 20
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage compaction-scripted --seeds 40
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage raft --seeds 1000
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage cores --seeds 200
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage storage --seeds 150
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage directories --seeds 24
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage compaction --seeds 24
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage compaction-wide --seeds 8
endif

# Containers from the image under faults at random; MINUTES= so long, SEED= repeats the faults' order.
chaos: setup
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

# Three nodes, all strategies and codecs, kills and leader moves; a million records from 10 minutes on. SEED= repeats keys and events.
soak: setup
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench,spark]' --no-build-isolation
	$(BIN)/python bench/run.py

dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation .

clean:
	rm -rf $(VENV) build dist *.egg-info
	find . -name '*.so' -delete
	rm -f node/proto/*_pb2.py node/proto/*_pb2.pyi
