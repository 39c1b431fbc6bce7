# One command each; every target sets up the .venv it needs, and works again when it is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-ray test-ray-quick test-data-parallel test-experiments test-docs test-clients test-processes test-integrations test-long pictures experiments experiments-quick check format benchmark benchmark-local benchmark-ray benchmark-network clean

demo: $(READY)  ## why backup workers are worth having: eight real processes, in under a minute
	$(BIN)/quorate demo --out demo --overwrite

test: check  ## the whole test command: lint, format, types, tests
	$(BIN)/python -m pytest

test-ray: $(READY)  ## the Ray engine through its contract, faults and clusters of several nodes; some 15 minutes
	$(BIN)/python -m pytest -m ray --timeout 600 tests/engines/ray

test-ray-quick: $(READY)  ## a part of test-ray, of a minute or two: CI runs it
	$(BIN)/python -m pytest -m ray --timeout 600 tests/engines/ray/test_engine.py tests/engines/ray/test_joining.py tests/engines/ray/test_user_cluster.py tests/engines/ray/test_cli.py tests/engines/ray/test_own_policy.py

test-data-parallel: $(READY)  ## quorate.DataParallel: real processes beside DDP, quorums, deaths, control, samples, checkpoints; some minutes
	$(BIN)/python -m pytest -m data_parallel tests/data_parallel

test-experiments: $(READY)  ## every experiment in seconds, from its trials to its figures; some minutes
	$(BIN)/python -m pytest -m experiments --timeout 300 tests/experiments

test-docs: $(READY)  ## every command that README and docs show, as a reader would copy it; some minutes
	$(BIN)/python -m pytest -m docs tests/test_commands_in_docs.py

test-clients: $(READY)  ## training scripts as other people write them, under every policy and beside DDP; a minute or two
	$(BIN)/python -m pytest -m clients tests/clients

test-processes: $(READY)  ## whole programs in processes of their own, killed and signalled, and what they leave behind; a minute or two
	$(BIN)/python -m pytest -m "processes and not long" tests/cli tests/engines/local

test-integrations: $(READY)  ## quorate.DataParallel with Accelerate, Lightning Fabric, transformers and compiled models; some minutes
	$(BIN)/python -m pytest -m integrations --timeout 600 tests/data_parallel tests/clients

test-long: $(READY)  ## the tests that take minutes
	$(BIN)/python -m pytest -m long --timeout 900

pictures: $(READY)  ## the screenshots of docs/, of runs made anew; needs a Chromium; a minute or two
	$(BIN)/python -m tests.pictures docs/pictures

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

experiments-quick: $(READY)  ## all experiments in minutes, on two cores, to see that they work
	$(BIN)/python -m experiments quick

DEVICE ?= cpu
PROCESSES ?= 1
experiments: $(READY)  ## all experiments in full, then figures; goes on where it stopped: DATA=folder DEVICE=cuda PROCESSES=16
	$(BIN)/python -m experiments run --device $(DEVICE) --processes $(PROCESSES) $(if $(DATA),--data $(DATA))
	$(BIN)/python -m experiments figures

benchmark: $(READY)  ## the simulator's cost, as ratios and rates
	$(BIN)/python -m benchmarks.simulator

benchmark-local: $(READY)  ## the local engine beside DDP and the floor; hours, or minutes with QUICK=--quick
	$(BIN)/python -m benchmarks.local $(QUICK)

benchmark-ray: $(READY)  ## the Ray engine beside Ray's own first-N parameter server; an hour, or minutes with QUICK=--quick
	$(BIN)/python -m benchmarks.ray $(QUICK)

benchmark-network: $(READY)  ## quorate.DataParallel beside DDP on hosts with slow links; needs root; an hour, or minutes with QUICK=--quick
	$(BIN)/python -m benchmarks.network $(QUICK)
	$(BIN)/python -m benchmarks.network.stragglers $(QUICK)

# The stamp is written last, so an interrupted set-up is simply done again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quorate needs Python 3.11 or newer; this is %s. Set PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis demo
