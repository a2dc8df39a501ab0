# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
VENV ?= .venv
# On a GPU machine choose the build that fits its driver, for instance: make demo TORCH=torch
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1

.PHONY: demo test setup check unit interpreter wheel vllm gpu clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q -e '.[dev,report]'
	touch $@

setup: $(VENV)/.ready

# The main job on the bundled model: what does an int8 input embedding cost?
demo: setup
	$(BIN)/exl3eval kld --variant int8-embed

# Everything CI checks, the tests last.
test: check interpreter unit

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2 -m 'not gpu and not slow and not vllm'

# The Triton kernels on a CPU, one program after the other.
interpreter: setup
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 -m interpreter tests/codec/test_triton.py

# The plugin and the engine in a real vLLM, in an environment of its own.
vllm: setup
	sh tools/vllm/install.sh .venv-vllm
	$(BIN)/pytest -m 'vllm and not slow'

# The built wheel, in an empty environment outside the checkout, runs the main job.
wheel: setup
	rm -rf dist build
	$(BIN)/python -m build -q --wheel
	sh tests/wheel_in_empty_environment.sh '$(PYTHON)' '$(TORCH)' dist/*.whl

# On a machine with an NVIDIA GPU.
gpu: setup
	$(BIN)/pytest -m gpu

clean:
	rm -rf $(VENV) dist build *.egg-info
