# Each verb sets up what it needs from a bare clone: `make swarm` is the first thing to type.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := .setup-stamp
# torch first and pinned: what pip finds for this version on this machine (a CPU build beside it, else the
# CUDA build) then satisfies everybody else's looser wish for torch.
TORCH := torch==2.13.0
FOLDERS := protocols p2p node cli
# Three quarters of all modules are never imported. Python compiles the others at their first import; pip would
# compile all of them, on one core.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Of each case of `make rig`; the published figures are of ATTEMPTS=100.
ATTEMPTS ?= 10
# Processes that run tests side by side: one more than the cores of a small machine, because tests of real nodes wait
# for a sixth of their time.
WORKERS ?= 3
# Every process of a test would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup test suite fast slow measure check lint mutants simulate chaos signals swarm swarm-moe rig clean-rig compose-test page-test docs package-test bench clean
.DEFAULT_GOAL := setup

setup: $(STAMP)  ## The virtual environment, the packages, the text to train on

$(STAMP): pyproject.toml tests/pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "atoll needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -e .
	mkdir -p .typing/atoll
	for folder in $(FOLDERS); do ln -sfn ../../$$folder .typing/atoll/$$folder; done
	ln -sfn ../tests/bench .typing/atoll_bench
	ln -sfn ../tests/rig/lab .typing/atoll_lab
	$(BIN)/python -m atoll.node.learning.data.shakespeare
# The kernels take one core for a minute; beside them, what only tests need. Then pytest compiles the modules of the
# tests once. Else each of the processes that run them would. What is wrong with them is said when they run.
	{ $(PIP) 'atoll[dev]' -e tests && { $(BIN)/python -m pytest --collect-only -qq -n 0 > /dev/null || true; } } & beside=$$!; trap 'kill $$beside' INT TERM; \
	$(BIN)/atoll node kernels; done=$$?; wait $$beside && exit $$done
	touch $(STAMP)

# Style, types and the simulator's seeds beside the tests: tests of real nodes often wait, and leave a core idle.
test: $(STAMP)  ## Everything that CI runs; the swarms come first. Of long suites a slice: it says which (`make slow`)
	$(MAKE) --jobs 3 lint suite simulate

suite: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

fast: $(STAMP)  ## The tests without real swarms
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m 'not swarm and not measure and not slow'

slow: $(STAMP)  ## The cases of long suites that `make test` leaves out; both together are all tests that pass or fail
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m 'slow and not measure'

measure: $(STAMP)  ## The same tests at full size, one after the other: what takes minutes and `make test` does smaller
	$(BIN)/python -m pytest -n 0 -m measure

check: lint  ## Style, types, layout
	$(BIN)/python -m pytest -q tests/test_layout.py

docs: $(STAMP)  ## The documentation as a site in build/site, with references made from the code
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: $(STAMP)  ## Break each promise on purpose in a copy of the tree; its tests must fail
	$(BIN)/python -m tests.mutants

# Nice: it takes what the tests beside it leave.
simulate: $(STAMP)  ## 300 seeds of 30 nodes and 20 virtual minutes, with faults and liars (docs/simulation.md)
	nice -n 19 $(BIN)/atoll sim --virtual -n 30 --minutes 20 --seed 0 --seeds 300

chaos: $(STAMP)  ## Real nodes through kills and power losses, judged by an oracle (docs/chaos.md; CHAOS=--full; root)
	$(BIN)/python -m tests.chaos $(CHAOS)

signals: $(STAMP)  ## A node is told to stop at 50 moments of its start, and ends in good order each time
	$(BIN)/python -m tests.signals

swarm: $(STAMP)  ## Four nodes train together; one is killed and comes back, a fifth joins half way
	$(BIN)/atoll sim --nodes 4 --kill --late-join --baselines

swarm-moe: $(STAMP)  ## The same with a mixture, each expert trained by one node
	$(BIN)/atoll sim --nodes 4 --preset moe-smoke --holders 1 --kill --late-join

rig: $(STAMP)  ## Nodes behind home routers: punched, relayed, rebound (Linux namespaces; root, nftables, iproute2)
	$(BIN)/python -m tests.rig.cases --attempts $(ATTEMPTS)

clean-rig: $(STAMP)  ## Remove what a rig that was killed left: namespaces, processes inside, folders (root)
	$(BIN)/python -m tests.rig --sweep

compose-test: $(STAMP)  ## The container image: built, four trainers, one killed and back; all removed again (Docker, or root)
	$(BIN)/python -m tests.compose

page-test: $(STAMP)  ## The web page in a real Chromium, its bars with real nodes (docs/web.md; Chromium)
	$(BIN)/python -m tests.page

package-test: $(STAMP)  ## The wheel and its own dependency list in a fresh environment; two nodes train there
	$(BIN)/python -m tests.package

bench: $(STAMP)  ## The published figures, against rivals; exit 1 where a bar is missed or not measured (docs/bench.md; wan: root, nftables)
	failed=0; for name in calls cli connections idle blobs compress topology reducers experts slices byzantine heal step wan; do $(BIN)/atoll bench $$name || failed=1; done; exit $$failed

clean:  ## Remove what set-up and the tools made; runs and identities stay
	rm -rf $(VENV) $(STAMP) .typing build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
