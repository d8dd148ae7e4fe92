# The two commands: `make train` and `make test`. Each makes .venv, installs what it needs and runs; a second call reuses .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/installed
# one thread a process: the suite and the trainer run two processes side by side
export OMP_NUM_THREADS = 1

.PHONY: train test lint clean ascend-check
# torch first: a CUDA build brings the triton it needs, and triton is added only where torch brought none (the CPU build)
$(STAMP): pyproject.toml setup.py Makefile
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "torch==2.13.0" "numpy<2.4"
	$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)' || $(PY) -m pip install --quiet "triton==3.6.0"
	$(PY) -m pip install --quiet -e ".[dev]"
	touch $@

train: $(STAMP)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 -m train_example.train $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

test: lint
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 -q -m interpret
	$(PY) -m pytest -n 2 -q

# Kernels to HIVM for Ascend, on a CPU. The compiler needs an environment without torch and without plain triton, and Python 3.11.
# ascendnpu-ir 1.0.0 is the compiler of CANN 8.5.0, the release that triton-ascend 3.2.0 is paired with; 1.2.0 is a newer one.
ASCEND_VENV := .venv-ascend
ASCEND_PYTHON ?= $(shell command -v python3.11)
ASCEND_OLD := $(ASCEND_VENV)/ascendnpu-ir-1.0.0

$(ASCEND_VENV)/installed: Makefile
	test -n "$(ASCEND_PYTHON)" || { echo "triton-ascend 3.2.0 needs Python 3.11: make ascend-check ASCEND_PYTHON=..."; exit 1; }
	$(ASCEND_PYTHON) -m venv $(ASCEND_VENV)
	$(ASCEND_VENV)/bin/python -m pip install --quiet "triton-ascend==3.2.0" "ascendnpu-ir==1.2.0" pybind11 "numpy<2.4"
	$(ASCEND_VENV)/bin/python -m pip install --quiet --upgrade --no-deps --target $(ASCEND_OLD) "ascendnpu-ir==1.0.0"
	touch $@

ascend-check: $(ASCEND_VENV)/installed
	PYTHONPATH=kernel_runtime/ascend/standin:. $(ASCEND_VENV)/bin/python -m kernel_runtime.ascend --compiler $(ASCEND_OLD) $(ARGS)

clean:
	rm -rf $(VENV) $(ASCEND_VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache
