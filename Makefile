# Both commands of the README work from a fresh clone with nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Processes that share the tests.
WORKERS ?= 2
PYTEST  := -m pytest -n $(WORKERS) --dist worksteal

.PHONY: run test lint unit interpreter seams gpu clean

run: $(STAMP)  ## the demo, on whatever this machine has
	$(BIN)/qwen35 demo

test: lint unit interpreter seams  ## linters, types, import contracts and every test that needs no GPU

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not interpreter"

interpreter: $(STAMP)  ## our Triton kernels on the CPU, in a process of their own
	TRITON_INTERPRET=1 $(BIN)/python $(PYTEST) -m interpreter

# The newer release runs on its own torch and FlashInfer, in an environment that is deleted again (10 GB while it is there).
NEWEST := $(VENV)/sglang-newest
seams: $(STAMP)  ## the seams inside SGLang and our FlashInfer adapter, with the newest supported releases of both
	trap 'rm -rf $(NEWEST)' EXIT; trap 'exit 1' INT TERM; rm -rf $(NEWEST); \
	$(BIN)/uv venv --quiet --python $(BIN)/python $(NEWEST) && \
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python -r requirements-newest.txt -e . && \
	$(NEWEST)/bin/python $(PYTEST) -m "not interpreter" tests/sglang_seam tests/flashinfer

gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

$(STAMP): pyproject.toml requirements.txt overrides.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "uv>=0.9"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --override overrides.txt -r requirements.txt -e .
	touch $@

clean:
	rm -rf $(VENV) runs
