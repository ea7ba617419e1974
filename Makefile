# `make demo` and `make test` need python3 >= 3.11 with venv and headers, gcc, make and git; each sets itself up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
REPO   ?= .
# A kernel that does not compile fails the build; 0 goes on without it, far slower.
export KEPT_REQUIRE_KERNELS ?= 1
# Nodes that tests start would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST  = $(BIN)/python -m pytest
PIP     = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
INSTALL = $(PIP) --no-build-isolation -e
KERNELS := $(shell find storage compaction client node -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
PROTOS  := $(wildcard node/proto/*.proto)

.PHONY: demo quick test test-slow smoke sim model chaos soak fuzz mutate check bench docs dist wheels release pins audit setup clean help

help:
	@echo "make demo | quick | test | test-slow | smoke | sim | model | chaos | soak | fuzz | mutate | check | bench | docs | dist | wheels | release | pins | audit | clean"

$(VENV)/.ready: pyproject.toml constraints.txt $(KERNELS) $(PROTOS) node/proto/build.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1' 'setuptools>=77' wheel cython grpcio-tools
	$(INSTALL) . --group test --group check
	@# Python would import what was compiled of a kernel that has another name now, or none, or for one version of Python.
	@find storage compaction client node -name '_*.so' -o -name '_*.c' | while read -r f; do test -e "$${f%%.*}.pyx" || rm "$$f"; done
	@find storage compaction client node -name '_*.cpython-*.so' -delete
	@touch $@

setup: $(VENV)/.ready

demo: setup
	@$(BIN)/python examples/git_changelog.py --repo "$(REPO)"
	@$(BIN)/python examples/spark_git_tree.py --repo "$(REPO)" --if-possible

test: setup
	@# Three: tests wait for real nodes a sixth of their time.
	$(PYTEST) -q -m "not slow" -n 3 --dist loadfile

# The pure cores and the formats: no node is started.
QUICK = tests/storage tests/compaction tests/replication tests/cluster tests/test_tidy.py \
        tests/node/coordinator/groups/test_histories.py tests/node/coordinator/groups/test_random_histories.py \
        tests/node/coordinator/groups/test_records.py tests/node/coordinator/groups/test_shard.py \
        tests/node/coordinator/transactions/test_histories.py tests/node/coordinator/transactions/test_requests.py \
        tests/node/internode/test_protobuf_conversion.py tests/node/kafka/codec tests/client/core/test_client_core.py tests/client/protocol/test_wire.py
LONGER = tests/replication/manifests/test_histories.py tests/replication/test_transactions_world.py tests/compaction/kernels/test_rule_map.py \
         tests/compaction/test_crash.py tests/compaction/test_example_strategy.py \
         tests/cluster/controller/test_unclean_recovery.py
quick: setup
	$(PYTEST) -q -m "not slow and not java" -n 2 $(QUICK) $(addprefix --ignore=,$(LONGER))

# PySpark (400 MB) and playwright are for the slow tests only; without Java they say that they did not run.
test-slow: setup
	$(INSTALL) '.[spark]' --group browser --group docs
	@# Spark's by themselves: PySpark waits with select(), which knows no descriptor above 1,023.
	@status=0; set -x; \
	$(PYTEST) -q -m slow -n 2 --dist loadscope --ignore=tests/spark || status=$$?; \
	$(PYTEST) -q -m slow tests/spark || status=$$?; \
	exit $$status

# One real run of each kind: five minutes of fuzzing, clients, Kafka's tools and its judgement of our files, a browser, Spark,
# the image, failovers. A part of test-slow; a landing waits for it, so the fuzzer's seed is a fixed one.
SMOKE = tests/fuzz/test_fuzz.py tests/compat/test_confluent.py tests/compat/test_kafka_python.py tests/compat/test_kafka_tools.py \
        tests/compat/test_node_client.py tests/compat/test_three_nodes.py \
        tests/client/test_client.py tests/compaction/test_judge.py tests/storage/test_judge_kafka_files.py \
        tests/node/coordinator/groups/test_kafka_tools.py tests/node/wire/test_cleaner.py \
        tests/console/test_browser.py tests/spark/test_read.py tests/deploy/test_image.py \
        tests/failover/test_failover.py tests/failover/test_truncation.py tests/node/wire/test_client_quotas.py tests/docs/test_pages.py \
        tests/docs/test_blocks_in_context.py tests/docs/test_site.py
smoke: setup
	$(INSTALL) '.[spark]' --group browser --group docs
	FUZZ_SEED=1 $(PYTEST) -q -m slow -n 2 --dist loadscope $(SMOKE)

# Whole clusters under one seed (docs/simulation.md). SEEDS= so many of each stage; MINUTES= for so long.
sim: setup
ifdef MINUTES
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --minutes $(MINUTES)
else ifdef SEEDS
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --seeds $(SEEDS)
else
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage raft --seeds 800
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage node --seeds 30
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage nodes --seeds 20
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage groups --seeds 12
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage transactions --seeds 10
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage security --seeds 30
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage nodes-compaction --seeds 10
	PYTHONHASHSEED=0 $(BIN)/python -m tests.sim --stage kills --seeds 4
	$(PYTEST) -q -m slow -n 2 --dist worksteal tests/sim/test_planted.py
endif

# The protocol of docs/compaction-protocol.md by itself, then each mistake in it. SECONDS= of CPU for each random run,
# STATES= for each run in breadth.
model: setup
	$(BIN)/python -m tests.model --all $(if $(SECONDS),--seconds $(SECONDS)) $(if $(STATES),--states $(STATES))

# Containers from the image under faults at random; MINUTES= so long, SEED= repeats the faults' order.
chaos: setup
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

# Three nodes, all strategies and codecs, kills and leader moves; a million records from 10 minutes on. SEED= repeats keys and events.
soak: setup
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

# Damaged requests, handshakes, certificates and files against a node in one process; SEED= repeats what was damaged, TARGET= attacks one thing.
fuzz: setup
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)) $(if $(TARGET),--target $(TARGET))

# Breaks lines of a module, one at a time, and prints those that its tests do not miss. COUNT= so many, SEED= others.
mutate: setup
	$(BIN)/python -m tests.tools.mutate $(MODULE) --count $(or $(COUNT),40) --seed $(or $(SEED),1) $(if $(TESTS),--tests $(TESTS))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(INSTALL) '.[spark]' --group bench
	$(BIN)/python bench/run.py

# The site, in build/site: index.html is to be opened as a file, or the folder served.
docs: setup
	$(PIP) --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

dist: setup
	$(PIP) --group dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation .
	$(BIN)/twine check --strict dist/*

# For a registry: the source archive, and a wheel for each platform, cross compiled and judged (docs/release.md); the one of this
# machine is then tried in an empty environment. PYTHONS= with which.
wheels: dist
	$(PIP) --group release
	rm dist/*.whl
	$(BIN)/python release/wheels.py dist/*.tar.gz
	$(BIN)/python release/try_wheel.py dist/*-manylinux2014_$(shell uname -m).whl dist/*.tar.gz $(addprefix --python ,$(PYTHONS))

# Everything of a release from the last commit, in dist/; a rehearsal, unless TAG=1. IMAGE=0: where no Docker is. docs/release.md
release: setup
	$(PIP) --group release
	$(BIN)/python release/release.py $(if $(TAG),--tag) $(if $(filter 0,$(IMAGE)),--without-image)

# After a change of constraints.txt, or of what pyproject.toml requires.
pins: setup
	$(PIP) --group release
	$(BIN)/python release/pins.py

# Asks PyPI for advisories on each version that the image and the release install; a package that it cannot tell about is a failure.
audit: setup
	$(PIP) --group release
	$(BIN)/pip-audit --strict --disable-pip --require-hashes $(addprefix -r ,$(wildcard release/requirements/*.txt)) --vulnerability-service $(or $(SERVICE),pypi)

clean:
	rm -rf $(VENV) build dist *.egg-info
	find . -name '*.so' -delete
	rm -f node/proto/*_pb2.py node/proto/*_pb2.pyi
