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
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: book test quick older suite opened test-pages lint style types serve bench measure compiled evidence hub test-notebooks gpu test-gpu test-turing test-cpus test-oldest test-oldest-interop test-next test-versions clean lock release

book: $(ENVIRONMENT)
	$(PY) tools/build_book.py

# Tests and types are checked beside the notebooks' cells and the book, whose pages are opened afterwards: each of them
# leaves a core idle for a while. With a GPU one after the other: chapters take times.
test: style
	$(MAKE) -j $(if $(shell command -v nvidia-smi),1,3) suite opened types

# For whoever changes a line: style, the rules of the house, and one room (make quick ROOM=nf4). Within two minutes.
quick: style
	$(PY) -m pytest -n auto --dist worksteal tests/test_house.py tests/test_contract.py tests/test_$(or $(ROOM),layer_norm).py

# Which recorded rows are of older sources than these, and which cases have none, without a GPU: file, case and column.
older: $(ENVIRONMENT)
	@$(PY) -m kernelbook.lab.older

# make suite MARK="not slow" leaves out the tests that take ten seconds or more.
suite: $(ENVIRONMENT)
	$(PY) -m pytest -n auto --dist worksteal --ignore tests/test_pages.py $(if $(MARK),-m "$(MARK)")

# The book shows what the tests of notebooks have executed.
opened: test-notebooks
	$(MAKE) book
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
	$(PY) -m kernelbook bench $(or $(ROOM),--all)

# The whole book on all GPUs of this machine: make measure SECONDS=3600, again until nothing is left; then make measure MERGE=1.
# With OLDER=FILE, both times, what make older printed into FILE; in a folder of its own, since its jobs have fewer cases.
MEASURE := _build/measure$(if $(OLDER),-older)
measure: $(ENVIRONMENT)
	$(PY) tools/measure.py $(if $(MERGE),--merge $(MEASURE),--out $(MEASURE) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only '$(ONLY)') $(if $(OLDER),--older $(OLDER)))

# What the compiler says of every kernel, for the tests and for the page "Compiled". Needs no GPU.
compiled: $(ENVIRONMENT)
	$(PY) tools/compiled_kernels.py

# How we know that it is right: faults planted in kernels, fuzz, repeats, sanitizers, on the GPU at hand or the CPU. Hours for
# all of it; make evidence SECONDS=600 takes ten minutes, and says what it did not reach.
evidence: $(ENVIRONMENT)
	$(PY) tools/evidence/faults.py
	$(PY) tools/evidence/error_rule.py
	$(PY) tools/evidence/fused_attention.py
	$(PY) tools/evidence/judged.py
	-$(PY) tools/evidence/host.py --seconds $(or $(SECONDS),14400) # where Cosmic Ray is installed
	$(PY) tools/evidence/record.py --seconds $(or $(SECONDS),14400)
	$(PY) tools/evidence/soak.py --seconds $(or $(SECONDS),3600) --out book/evidence/soak.json

# Every cell of every chapter is a test, by nbval; what a chapter prints is kept for the build of the book where all of them pass.
# make test-notebooks NOTEBOOK=nf4 for one chapter. On a GPU one after the other: some of them take times.
test-notebooks: export PYTHONPATH := $(CURDIR)/tools:$(PYTHONPATH)
test-notebooks: $(ENVIRONMENT)
	$(PY) -m pytest -p keep_executed -n $(if $(shell command -v nvidia-smi),0,auto) --dist loadfile --nbval --nbval-cell-timeout 600 notebooks/$(if $(NOTEBOOK),$(NOTEBOOK).ipynb)

# What needs a GPU says so at once, instead of skipping every test.
gpu: $(ENVIRONMENT)
	@$(PY) -c "from kernelbook import runtime; exit(runtime.DEVICE.type != 'cuda' and 'make: no GPU runs kernels here')"

# Fourteen processes share a GPU of 80 GB. In two halves, each with whole functions: make test-gpu PART=1/2, make test-gpu PART=2/2.
test-gpu: gpu
	$(PY) -m pytest -m "gpu and not alone" -n $(or $(WORKERS),14) --dist worksteal $(if $(PART),--part $(PART)) tests
	$(PY) -m pytest -m "gpu and alone" $(if $(PART),--part $(PART)) tests

# The rooms' tests, and the chapters, with plans and kernels for a T4, run by a newer GPU; the results are rows of
# book/versions.csv.
test-turing: gpu
	$(PY) tools/try_versions.py --here --only sm_75 --workers $(or $(WORKERS),14)

# The tests that compare numbers as other CPUs would: PyTorch, MKL (under PyTorch) and NumPy with its OpenBLAS (under the
# interpreter) take the code that they have for those, one setting after the other. make test-cpus CPUS=ATEN_CPU_CAPABILITY=avx2
CPUS := ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
	OPENBLAS_CORETYPE=SkylakeX OPENBLAS_CORETYPE=Haswell OPENBLAS_CORETYPE=Nehalem \
	NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL,AVX512_SPR OMP_NUM_THREADS=2
test-cpus: $(ENVIRONMENT)
	set -e; files=$$(grep -lE 'check_op|check\.compare|assert_as_eager|assert_close|relative_error' tests/test_*.py); \
	for cpu in $(CPUS); do echo "$$cpu"; env "$$cpu" $(PY) -m pytest -n auto --dist worksteal $$files; done

# The oldest versions that the package supports, and the newest that the index has, before pins are moved: each in an
# environment of its own. Every kernel is compiled for a Hopper GPU, and some rooms run in the interpreter. (NumPy
# 2.4 breaks Triton 3.6's interpreter.)
SHORT := tests/test_runtime.py tests/test_launch.py tests/test_compiles.py tests/test_layer_norm.py tests/test_nf4.py
OLDEST := torch==2.11.0 triton==3.6.0 numpy==2.2.6
test-oldest: OTHER := $(OLDEST)
test-oldest: test-oldest-interop
test-next: OTHER := --upgrade --pre torch triton numpy
test-oldest test-next:
	$(PYTHON) -m venv --clear $(VENV)-$@
	$(VENV)-$@/bin/python -m pip install --quiet pytest pytest-xdist hypothesis pandas tabulate tqdm matplotlib pyyaml
	$(VENV)-$@/bin/python -m pip install --quiet $(OTHER)
	$(VENV)-$@/bin/python -m pytest -n auto --dist worksteal $(SHORT) -k "not page_holds and not others and not sm_75"

# Pairs of PyTorch and Triton, each in an environment of its own; what came out goes into book/versions.csv, which "Running the
# book" shows. make test-versions ONLY=triton==3.8.0 for one pair.
test-versions: $(ENVIRONMENT)
	$(PY) tools/try_versions.py $(if $(ONLY),--only '$(ONLY)') $(if $(WORKERS),--workers $(WORKERS))

# The oldest of each neighbour, as pyproject.toml bounds them, with the oldest pair. A transformers wants a kernels of its time, and
# the oldest cannot be imported beside the one that we support: that runs beside the oldest transformers that takes it.
test-oldest-interop:
	$(PYTHON) -m venv --clear $(VENV)-$@
	$(VENV)-$@/bin/python -m pip install --quiet pytest pytest-xdist hypothesis $(OLDEST) \
		transformers==5.8.0 peft==0.20.0 accelerate==1.10.0 bitsandbytes==0.50.0
	$(VENV)-$@/bin/python -m pytest -n auto --dist worksteal tests/test_swap.py tests/test_interop_*.py tests/test_captured_models.py
	$(VENV)-$@/bin/python -m pip install --quiet 'transformers[kernels]==5.19.0' kernels==0.17.2
	$(VENV)-$@/bin/python -m pytest -n auto --dist worksteal tests/test_hub.py tests/test_captured_models.py

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
	rm -rf _build dist $(VENV) $(VENV)-test-* .pytest_cache .ruff_cache .mypy_cache .hypothesis

# A module is compiled when it is first imported; most of what is installed never is.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile -r requirements.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
