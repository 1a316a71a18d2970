# Every target sets .venv up first; `make help` says what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON_RUN := .venv/bin/python
# Workers and the processes of tests share compiled files, also where PYTHONDONTWRITEBYTECODE is set.
TEST_RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder
FORMAT ?= mds
RUNS ?= runs
WORK ?= data
DEMO_IMAGES := 2000
# What first-light trains: recipes sized for the machine at hand.
FIRST_LIGHT ?= yamls/first_light/droppos.yaml yamls/first_light/mae.yaml

# The fast tier: methods, encoder, positions and recipes, without the two files that train longest.
FAST := tests/nn tests/algorithms tests/model tests/augment tests/recipe tests/training/optimizer tests/data/decode
SLOW := tests/model/test_trained_leaks.py tests/model/test_fsdp.py
# Files say themselves that they belong here.
SCIENCE = $(shell grep -rl --include="*.py" "^pytestmark = pytest.mark.science" tests)

.PHONY: help setup test test-fast test-science test-oldest test-newest certify certify-demo drill lint types demo data first-light adapt speech bench-setup bench-loader bench-methods check-plan gpu-minutes gpu-report gpu-count gpu-bundle learn position-table evaluation-table clean

help: ## List the targets (this text).
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' Makefile

setup: ## Make .venv with pinned requirements and FFCV's system packages (older drivers: TORCH=2.7).
	@.setup/venv.sh

test: setup ## Run the tests on two cores (real photographs: POSPRE_TEST_DATA=<folder>).
	$(TEST_RUN) $(PYTHON_RUN) $(PYTEST) $(ARGS)

test-fast: setup ## Run the tests of methods, encoder, positions and recipes, in two to three minutes on two cores.
	$(TEST_RUN) $(PYTHON_RUN) $(PYTEST) $(FAST) $(addprefix --ignore=,$(SLOW)) $(ARGS)

test-science: setup ## Run parity with published code, contracts, leaks, draws and exact resume, in about a minute on two cores.
	$(TEST_RUN) $(PYTHON_RUN) $(PYTEST) -m science $(SCIENCE) $(ARGS)

test-oldest: setup ## Run the tests of methods, encoders and runs with torch 2.7 (.venv-oldest, 8 GB).
	@.setup/beside.sh oldest
	$(TEST_RUN) .venv-oldest/bin/python $(PYTEST) tests/algorithms tests/nn tests/model tests/run $(ARGS)

test-newest: setup ## Run the tests with the newest torch, torchvision and timm (.venv-newest, 8 GB).
	@.setup/beside.sh newest
	@# their deprecation warnings would mix with output that tests read
	PYTHONWARNINGS=ignore::FutureWarning $(TEST_RUN) .venv-newest/bin/python $(PYTEST) $(ARGS)

certify: need-RECIPE setup ## Prove that RECIPE=<yaml> resumes exactly: killed, on other ranks (ARGS="data.path=…").
	$(PYTHON_RUN) -m pospre.certify "$(RECIPE)" $(ARGS)

certify-demo: setup ## The same for every demo recipe, on a few pictures; 15 minutes on 2 cores.
	PYTHONPATH=. $(PYTHON_RUN) tests/drills/certify_demos.py $(ARGS)

drill: setup ## Kill a run 200 times while its bucket misbehaves (ARGS="--server seaweedfs --kills 20 --outages 5").
	PYTHONPATH=. $(PYTHON_RUN) tests/drills/s3_kills.py $(ARGS)

lint: setup ## Check the code's style and formatting with ruff.
	$(PYTHON_RUN) -m ruff check .
	$(PYTHON_RUN) -m ruff format --check .

types: setup ## Check the types with mypy.
	$(PYTHON_RUN) -m mypy

data: need-SRC need-DST setup ## Convert images: make data SRC=<folder> DST=<data set> FORMAT=mds|ffcv.
	$(PYTHON_RUN) -m data_prep.convert "$(SRC)" "$(DST)" --format "$(FORMAT)" $(ARGS)

demo: setup ## Render scenes, convert, pre-train DropPos, measure, export, report (ARGS="trainer.precision=fp32").
	$(PYTHON_RUN) -m data_prep.scenes $(WORK)/scenes --num-images $(DEMO_IMAGES)
	@RUNS="$(RUNS)" .setup/first_light.sh $(WORK)/scenes $(WORK)/demo yamls/demo/droppos.yaml $(ARGS)

first-light: need-DATA setup ## Train DropPos and MAE on DATA=<folder of images>, as demo does (ARGS="key.sub=value …").
	@RUNS="$(RUNS)" .setup/first_light.sh "$(DATA)" "$(WORK)/first_light" $(FIRST_LIGHT) $(ARGS)

adapt: need-DATA need-WEIGHTS setup ## Continue WEIGHTS=<file> on DATA=<folder of images> for minutes of two cores, and judge it (ARGS="verdict.figure=knn/top1").
	$(PYTHON_RUN) -m pospre.train adapt/look encoder.weights="$(WEIGHTS)" data.path="$(DATA)" $(ARGS)

speech: need-DATA setup ## Train keyword spotting on DATA=<folder or tar of WAV files>, from scratch and from MP3.
	@RUNS="$(RUNS)" .setup/speech.sh "$(DATA)" "$(WORK)/speech"

bench-setup: setup ## Install the loaders for bench-loader into .venv-bench.
	@.setup/bench.sh

bench-loader: need-DATA setup ## Compare our loader with others on DATA=<folder of images>; bench-setup first.
	PYTHONPATH=. $(PYTHON_RUN) tests/benchmarks/bench_loader.py "$(DATA)" $(ARGS)

bench-methods: setup ## Compare a step of every method with a plain one: time, FLOPs, peak memory.
	PYTHONPATH=. $(PYTHON_RUN) tests/benchmarks/bench_methods.py $(ARGS)

check-plan: setup ## Compare the FLOPs and memory of `python -m pospre.plan` with measured ones.
	PYTHONPATH=. $(PYTHON_RUN) tests/benchmarks/check_plan.py $(ARGS)

gpu-minutes: setup ## On a GPU: the figures of most worth in so many minutes; again: the others (ARGS="--minutes 8").
	PYTHONPATH=. $(PYTHON_RUN) -m tests.benchmarks.gpu_minutes $(ARGS)

gpu-report: setup ## On a machine with GPUs, in hours: speed and memory of every method (images: DATA=…).
	PYTHONPATH=. $(PYTHON_RUN) -m tests.benchmarks.gpu_minutes --grid $(if $(DATA),--data "$(DATA)") $(ARGS)

gpu-count: setup ## Count kernels, bytes and FLOPs of a step on GPUs that are not there (ARGS="--methods mae").
	PYTHONPATH=. $(PYTHON_RUN) -m tests.benchmarks.gpu_count $(ARGS)

gpu-bundle: need-FREEZE setup ## Make bundle/: what a node without a network lacks beside the packages in FREEZE=<its pip list>.
	PYTHONPATH=. $(PYTHON_RUN) .setup/bundle.py "$(FREEZE)" $(ARGS)

learn: need-DATA setup ## Pre-train every method on DATA=<class folders> in minutes each; kNN and logistic accuracy.
	PYTHONPATH=. $(PYTHON_RUN) tests/benchmarks/learn.py "$(DATA)" $(ARGS)

position-table: need-DATA setup ## Measure position schemes under hosts, with contrasts declared before: kNN, linear, larger images.
	PYTHONPATH=. $(PYTHON_RUN) tests/benchmarks/position_table.py "$(DATA)" $(ARGS)

evaluation-table: setup ## Run every evaluation at demo size: command, time, figures of random weights and ours.
	PYTHONPATH=. $(PYTHON_RUN) tests/benchmarks/evaluation_table.py $(ARGS)

# Before set-up, so that a missing variable is an error at once.
need-%:
	@[ -n "$($*)" ] || { echo "error: $*=… is missing; make help shows how to give it" >&2; exit 2; }

clean: ## Remove caches; .venv, runs and data stay.
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pospre data_prep tests -name __pycache__ -type d -prune -exec rm -rf {} +
