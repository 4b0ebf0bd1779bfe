# Needs Python 3.11 or later, make, a C compiler (the layers' own code) and a C++ compiler (torch.compile on a CPU).
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN    := $(VENV)/bin
comma  := ,
DEV    := $(VENV)/.installed-dev
DEMO   := $(VENV)/.installed-demo
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# Runs a command while holding a lock on this file, so that two makes at once take turns at the environment.
LOCKED := $(PYTHON) -c 'import fcntl, subprocess, sys; \
	lock = open("Makefile"); fcntl.flock(lock, fcntl.LOCK_EX); \
	sys.exit(subprocess.call(sys.argv[1:]))'

# $(call install,requirements,stamps): does nothing if another make brought the stamp up to date meanwhile.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
@$(LOCKED) sh -ec ' \
	if [ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ]; then exit 0; fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	echo "Installing into $(VENV) ..."; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(1); \
	touch $(2)'
endef

.PHONY: help install test test-slow lint types bench demo clean distclean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

install: $(DEV)  ## create the environment with everything that tests need

test: $(DEV)  ## run the fast tests
	$(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(DEV)  ## run the slow tests
	$(PYTEST) -m "slow and not gpu" $(PYTEST_ARGS)

lint: $(DEV)  ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(DEV)  ## check types
	$(BIN)/mypy src

bench: $(DEV)  ## time and memory against torch's own layers
	$(BIN)/hyperball bench $(BENCH_ARGS)

demo: $(DEMO)  ## train small networks on digits and point clouds and write demo.html
	$(BIN)/hyperball demo --out demo.html

clean:  ## remove what building, testing and the demo leave behind
	rm -rf build dist demo.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean  ## remove the environment too
	rm -rf $(VENV)

$(DEV): pyproject.toml constraints.txt
	$(call install,-e ".[dev]",$(DEV) $(DEMO))

# The demo needs these two extras alone, and the development environment has them.
$(DEMO): pyproject.toml constraints.txt
	$(call install,-e ".[train$(comma)report]",$(DEMO))
