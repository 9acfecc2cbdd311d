# Everything a developer does, from a fresh clone on: needs git, make and Python with venv.

PYTHON ?= python3
NP ?= 2
ARGS ?=
# Tests at a time: some compute, others start ranks and wait for deadlines.
WORKERS ?= $(shell echo $$(($$(nproc) + 2)))

VENV := .venv
BIN := $(VENV)/bin
CSRC := $(wildcard hvdkit/kernels/csrc/* hvdkit/transports/csrc/* hvdkit/arena/csrc/*)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help train test test-all test-defects coverage cluster-test wheel-test lint docs format clean

help: ## list what make can do
	@sed -n 's/^\([a-z-]*\): .*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "make %-12s %s\n", $$1, $$2 }'

train: $(VENV)/.ready-train ## set up .venv and train the digits example on NP=2 processes (ARGS=... to the script)
	$(BIN)/hvdkitrun -np $(NP) $(BIN)/python examples/pytorch_digits.py $(ARGS)

test: $(VENV)/.ready-test ## set up .venv and run the tests (ARGS=... to pytest)
	$(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

test-all: $(VENV)/.ready-test ## all tests there are, over hosts too, and 200 faults; writes tests/REPORT.md
	tests/suite/all.sh $(abspath $(BIN))/python $(WORKERS)

test-defects: $(VENV)/.ready-test ## put former defects back in, one at a time, and count which the tests find
	$(BIN)/python -m tests.defects.run $(ARGS)

coverage: $(VENV)/.ready-test ## what the tests cover, of Python and of C++ (ARGS="--all" for all tests)
	tests/suite/coverage.sh $(abspath $(BIN))/python $(WORKERS) $(ARGS)

cluster-test: $(VENV)/.ready-test ## build the image of docker/ and run the tests over hosts (needs Docker or root; ARGS=... to pytest)
	docker/cluster-test.sh $(abspath $(BIN))/python $(ARGS)

wheel-test: ## build wheels and try them in bare containers (needs root and Debian; ARGS=... names Pythons, see the script)
	docker/wheel-test.sh $(or $(ARGS),debian:bookworm debian:trixie debian:forky=torch)

lint: $(VENV)/.ready-test ## ruff, mypy, import-linter, clang-format and names, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.suite.readable
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

docs: $(VENV)/.ready-docs ## build the documentation into build/site; warnings and broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d build/site

format: $(VENV)/.ready-test ## let ruff and clang-format rewrite the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CSRC)

clean: ## remove what was built, and the caches; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f hvdkit/kernels/_native*.so $(VENV)/.ready-*
	find hvdkit tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of extras: what either target needs is added to the same .venv, and a second make does nothing.
$(VENV)/.ready-train: EXTRAS := torch,mpi,examples
$(VENV)/.ready-train: WHY := PyTorch, an MPI and the data of the example
$(VENV)/.ready-test: EXTRAS := torch,tensorflow-cpu,mpi,test
$(VENV)/.ready-test: WHY := both frameworks, the libraries and the linters of all tests (4 GB)
# It asks for tensorflow, which tensorflow-cpu is without pip's knowing.
$(VENV)/.ready-test: ALONE := tf-keras
# Docstrings are read from the sources, so no framework is needed.
$(VENV)/.ready-docs: EXTRAS := docs
$(VENV)/.ready-docs: WHY := mkdocs and its plugins

# "compat" installs a path, for scripts beside a checkout named hvdkit: Python would take its folder for the package.
# The pinned build tools come first, so that the build is as reproducible as the rest. Of pip's progress the big
# downloads are shown and errors in full; the rest is in the log, where setup.py also says if nothing could be compiled.
$(VENV)/.ready-train $(VENV)/.ready-test $(VENV)/.ready-docs: pyproject.toml constraints.txt setup.py $(CSRC)
	@test -x $(BIN)/python || { echo "hvdkit: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "hvdkit: installing $(WHY) into $(VENV); the first time, this takes some minutes"
	@rm -f $(VENV)/pip.log
	@$(PIP_INSTALL) -q setuptools wheel pybind11
	@{ $(PIP_INSTALL) --no-build-isolation --config-settings editable_mode=compat --log $(VENV)/pip.log -e '.[$(EXTRAS)]'; echo $$? > $(VENV)/pip.status; } \
	    | grep -E --line-buffered '^ *(Downloading|Using cached) .* MB|^Installing collected' | cut -c 1-110; \
	    exit $$(cat $(VENV)/pip.status)
	@test -z '$(ALONE)' || $(PIP_INSTALL) -q --no-deps $(ALONE)
	@grep -o 'hvdkit: no .*, using the numpy kernels' $(VENV)/pip.log | head -n 1
	@touch $@
