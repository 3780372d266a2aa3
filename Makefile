# The two commands are 'make book' and 'make test'. Neither needs a GPU; both use one where there is one.
PYTHON ?= python3
VENV ?= .venv
# PY=python3 uses an environment that exists already, instead of making one in $(VENV).
PY ?= $(VENV)/bin/python
PORT ?= 8000

ENVIRONMENT := $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.installed)
# Notebooks run in this environment, whatever kernels the user has installed elsewhere.
export JUPYTER_PREFER_ENV_PATH := 1
# Hundreds of processes import the package: without kept bytecode each of them compiles torch's modules anew, 2.6 of 4.6 seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPATH := $(CURDIR)/src:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: book test quick stale unit check-book test-pages lint style types serve bench compiled evidence evidence-host hub test-notebooks gpu test-gpu test-turing test-cpus test-oldest clean lock release

book: $(ENVIRONMENT)
	$(PY) tools/build_book.py

# Tests and types are checked beside the notebooks' cells and the book, whose pages are opened afterwards: each of them
# leaves a core idle for a while. With a GPU one after the other: chapters take times.
test: style
	$(MAKE) -j $(if $(shell command -v nvidia-smi),1,3) unit check-book types

# For whoever changes a line: style, the rules of the house, and one room (make quick ROOM=nf4). Within two minutes.
quick: style
	$(PY) -m pytest -n auto --dist worksteal tests/test_house.py tests/test_contract.py tests/test_$(or $(ROOM),layer_norm).py

# Which recorded rows are older than the kernels, or not dated: file, function and count. Needs no GPU.
stale: $(ENVIRONMENT)
	@$(PY) -m kernelbook.lab.record

# make unit MARK="not slow" leaves out the tests that take ten seconds or more.
unit: $(ENVIRONMENT)
	$(PY) -m pytest -n auto --dist worksteal --ignore tests/test_pages.py $(if $(MARK),-m "$(MARK)")

# The book is not built where a cell of a chapter fails.
check-book: book
	$(MAKE) test-pages

# Opens every page of the built book in Chromium, if there is one.
test-pages: $(ENVIRONMENT)
	$(PY) -m pytest -n auto --dist worksteal -rs tests/test_pages.py

lint: style types

style: $(ENVIRONMENT)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(ENVIRONMENT)
	$(PY) -m mypy

serve:
	@test -f _build/html/index.html || { echo "There is no built book yet: run 'make book' first."; exit 1; }
	$(PYTHON) -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

# make bench ROOM=layer_norm; without ROOM, every room. Needs a GPU.
bench: $(ENVIRONMENT)
	$(PY) -m bench $(or $(ROOM),--all)

# What the compiler says of every kernel, for the tests and for the page "Compiled". Needs no GPU.
compiled: $(ENVIRONMENT)
	$(PY) tools/compiled_kernels.py

# Do the tests notice a broken kernel? A sample of faults in each room, hours of them: make evidence ROOM=nf4 FAULTS=40
evidence: $(ENVIRONMENT)
	$(PY) tools/evidence/faults.py $(if $(ROOM),--rooms $(ROOM)) $(if $(FAULTS),--faults $(FAULTS))
	$(PY) tools/evidence/error_rule.py
	$(PY) tools/evidence/fused_attention.py

# The same for the host's code, where Cosmic Ray is installed.
evidence-host: $(ENVIRONMENT)
	mkdir -p _build
	cosmic-ray init tools/evidence/host.toml _build/host.sqlite
	cr-filter-operators _build/host.sqlite tools/evidence/host.toml
	cosmic-ray exec tools/evidence/host.toml _build/host.sqlite
	cr-report _build/host.sqlite

# Executes every chapter and keeps what it prints for the book; a cell that fails is an error.
# make test-notebooks NOTEBOOK=nf4 for one chapter. On a GPU one after the other: some of them take times.
test-notebooks: $(ENVIRONMENT)
	$(PY) tools/build_book.py --execute $(NOTEBOOK)

# What needs a GPU says so at once, instead of skipping every test.
gpu: $(ENVIRONMENT)
	@$(PY) -c "from kernelbook import runtime; exit(runtime.DEVICE.type != 'cuda' and 'make: no GPU runs kernels here')"

# Fourteen processes share a GPU of 80 GB. In two halves, each with whole functions: make test-gpu PART=1/2, make test-gpu PART=2/2.
test-gpu: gpu
	$(PY) -m pytest -m "gpu and not alone" -n $(or $(WORKERS),14) --dist worksteal $(if $(PART),--part $(PART)) tests
	$(PY) -m pytest -m "gpu and alone" $(if $(PART),--part $(PART)) tests

# The rooms' tests, and the chapters, with rules and kernels for a T4, run by a newer GPU.
test-turing: gpu
	$(PY) -m pytest -m "not alone and not soak" --stand-in sm_75 -n $(or $(WORKERS),14) --dist worksteal $(TURING)
TURING := $(patsubst %,tests/test_%.py,layer_norm rms_norm sparse_linear scatter_ffn attention attention_decode nf4 fp4 moe_lora memory)

# The tests that compare numbers as other CPUs would: PyTorch, MKL (under PyTorch) and NumPy with its OpenBLAS (under the
# interpreter) take the code that they have for those, one setting after the other. make test-cpus CPUS=ATEN_CPU_CAPABILITY=avx2
CPUS := ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
	OPENBLAS_CORETYPE=SkylakeX OPENBLAS_CORETYPE=Haswell OPENBLAS_CORETYPE=Nehalem \
	NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL,AVX512_SPR OMP_NUM_THREADS=2
test-cpus: $(ENVIRONMENT)
	set -e; files=$$(grep -lE 'check_op|check\.compare|assert_as_eager|assert_close|relative_error' tests/test_*.py); \
	for cpu in $(CPUS); do echo "$$cpu"; env "$$cpu" $(PY) -m pytest -n auto --dist worksteal $$files; done

# Other versions of Python, PyTorch, Triton and neighbours: nox -l lists them (noxfile.py).
test-oldest:
	$(PYTHON) -m nox -s oldest oldest_interop

# A kernel repository for Hugging Face's kernels, in _build/hub.
hub: $(ENVIRONMENT)
	$(PY) tools/build_hub.py

# Archives in dist, each installed into an empty environment where the doctor runs: make release VERSION=0.2.0
release: $(ENVIRONMENT)
	$(PY) -m pip install --quiet build twine
	$(PY) tools/release.py $(VERSION)

# Pins anew what pyproject.toml asks for. Needs uv.
lock:
	pins=$$(uv pip compile --quiet pyproject.toml) && { \
		echo "# The whole pinned environment: package, book, tests. Made from pyproject.toml by 'make lock'."; \
		echo "$$pins"; } > requirements.txt

clean:
	rm -rf _build dist $(VENV) .nox .pytest_cache .ruff_cache .mypy_cache .hypothesis

# A module is compiled when it is first imported; most of what is installed never is.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile -r requirements.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
