# `make demo` and `make test` set everything up by themselves; they need python3 (>= 3.11), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Real data for tests and recipes, where they lie beside the checkout.
SHARED := ../shared/data
DATA := $(if $(wildcard $(SHARED)/unpack),.data/.unpacked)
export FEDLOOM_DATA ?= $(if $(DATA),$(CURDIR)/.data)

# Small steps on many threads wait for each other; the tests and the demo run on one.
export OMP_NUM_THREADS ?= 1
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint audit format bench docs gpu lock lock-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,text,parquet,tff,tune,ui,track,privacy,ray,flower]'
	-$(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib > /dev/null  # on all cores, where pip takes one
	touch $@

.data/.unpacked: $(STAMP) $(wildcard $(SHARED)/SHA256SUMS)
	$(BIN)/python $(SHARED)/unpack .data
	touch $@

setup: $(STAMP) $(DATA)  ## build .venv with fedloom and its tools (once)

demo: $(STAMP)  ## the five papers, alone and stacked, on digits: 20 clients with 2 classes each
	$(BIN)/fedloom compare --data digits --partition "classes(per_client=2)" --clients 20 --per-round 5 \
	  --model "mlp(hidden=[64])" --rounds 60 --epochs 2 --batch-size 20 --lr 0.1 --seeds 3 --out runs/demo --overwrite \
	  fedavg "radfed(redistributions=5)" "2dlrd(window=10)" "adabest(beta=0.9)" dgt fedglad "fedadam(lr=0.03)" \
	  "radfed(redistributions=5)+adabest(beta=0.9)+dgt+fedglad+2dlrd(window=10)"

# Two processes for two cores; both must pass.
HALF := tests/data tests/methods tests/engines tests/models tests/test_reference.py tests/diagnose tests/test_rounds.py tests/test_lockstep.py

test: $(STAMP) $(DATA)  ## the tests of every day (below 8 minutes on 2 cores)
	@$(BIN)/python -m pytest -m "not long and not gpu" -p no:cacheprovider $(HALF) > .half.log 2>&1 & half=$$!; \
	$(BIN)/python -m pytest -m "not long and not gpu" $(HALF:%=--ignore=%); other=$$?; \
	wait $$half; first=$$?; tail -n 40 .half.log; rm -f .half.log; exit $$((first || other))

test-all: $(STAMP) $(DATA)  ## the long ones too
	$(BIN)/python -m pytest -m "not gpu"

lint: $(STAMP)  ## ruff, mypy and bandit
	@$(BIN)/mypy > .types.log 2>&1 & types=$$!; \
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/bandit -q -r src scripts benchmarks; other=$$?; \
	wait $$types; first=$$?; cat .types.log; rm -f .types.log; exit $$((first || other))

audit: $(STAMP)  ## known holes in what is installed; asks an advisory service, so not part of lint
	$(BIN)/python scripts/audit.py

format: $(STAMP)  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## on this machine: sample gradients per second, many clients, the server's stages
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python benchmarks/throughput.py $(BENCH)
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/server.py

docs: $(STAMP)  ## write the reference pages in docs/ from what the code says
	$(BIN)/python scripts/reference_pages.py

gpu:  ## tests/gpu and the benchmarks on a CUDA machine, from src, nothing installed
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest -m gpu tests/gpu
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) benchmarks/throughput.py $(BENCH)
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) benchmarks/server.py

lock: $(STAMP)  ## resolve everything anew and write constraints.txt
	$(BIN)/python scripts/lock.py --write

lock-check:  ## does one resolution still hold all extras together?
	$(PYTHON) scripts/lock.py

clean:  ## remove what the targets above made
	rm -rf $(VENV) .data runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
