# Both commands of the README work from a fresh clone with nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test lint unit interpreter seams gpu clean

run: $(STAMP)  ## the demo, on whatever this machine has
	$(BIN)/qwen35 demo

test: lint unit interpreter seams  ## linters, types, import contracts and every test that needs no GPU

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m pytest -m "not interpreter"

interpreter: $(STAMP)  ## our Triton kernels on the CPU, in a process of their own
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interpreter

# The newer release is laid over the same environment and removed again: it runs on the older one's dependencies.
SEAMS := $(CURDIR)/$(VENV)/sglang-0.5.23
seams: $(STAMP)  ## the seams inside SGLang, against the newer supported release too
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(SEAMS) sglang==0.5.23
	PYTHONPATH=$(SEAMS) $(BIN)/python -m pytest tests/sglang_seam; code=$$?; rm -rf $(SEAMS); exit $$code

gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

$(STAMP): pyproject.toml requirements.txt overrides.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "uv>=0.9"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --override overrides.txt -r requirements.txt -e .
	touch $@

clean:
	rm -rf $(VENV) runs
