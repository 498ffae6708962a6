# Everything a contributor types. `make setup` is implied; a second run of it does nothing.

PYTHON ?= python3
BIN := .venv/bin
# One process per pytest worker, one thread per process: fastest on small machines, and floats add in one order.
QUIET := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
WORKERS ?= 2
# Rooms whose networks `--device` moves.
PLACED := $(addprefix tests/,calibration correction decide engine passes ranges rounding search simulate test_pipeline.py test_verify.py)

.PHONY: help setup demo test test-all check format docs captures notebooks site browse walk wheel bench bench-accuracy bench-qat bench-algorithms bench-small snapshots fuzz random zoo
.PHONY: gallery mutants kills chaos silicon clean test-device gpu
help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.ready ## make .venv and install chipfit with every tool it is developed with

.venv/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	touch $@

.venv/.ready: .venv/.torch pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[onnx,mct,openvino,litert,tflm,keras,backends,images,bench,vela,docs,dev]"
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt tf-keras # with the TensorFlow that is there
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt executorch torchao pytorch-tokenizers expecttest mpmath ruamel.yaml tabulate
	touch $@

demo: setup ## quantize a small network, export it, verify every integer, write a report to demo_out/
	$(QUIET) $(BIN)/chipfit demo

check: setup ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A process in which an accelerator has computed gradients cannot be forked, which other tests do. With worksteal,
# most tests of a file run in one worker, which makes the fixtures of the file once.
test: check ## what every change must pass
	$(QUIET) $(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not slow" --ignore tests/device
	$(QUIET) $(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not slow" --device fake tests/device

test-device: setup ## networks of torch on an accelerator in host memory, whose rules are those of CUDA: DEVICE= names a real one
	$(QUIET) $(BIN)/pytest -q -n $(WORKERS) --device $(or $(DEVICE),fake) tests/device
	$(QUIET) $(BIN)/pytest -q -n $(WORKERS) -m "not slow" --device $(or $(DEVICE),fake) $(PLACED)

gpu: setup ## what needs a real accelerator: tests/device, and time, memory and plans beside those of the CPU
	name=$$($(BIN)/python benchmarks/accelerator.py --name) && $(BIN)/pytest -q --device $$name tests/device
	$(BIN)/python benchmarks/accelerator.py

test-all: check ## the same, with the slow tests: model zoo, many random networks
	$(QUIET) $(BIN)/pytest -q -n $(WORKERS)

wheel: setup ## build wheel and source archive in dist/
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"

docs: setup ## write the generated pages again: support table, JSON Schema of platform files
	$(BIN)/python docs/generate.py

captures: setup ## run the commands of the tutorial and draw what they print, and the report, for the docs
	$(QUIET) $(BIN)/python docs/captures.py

notebooks: setup ## run the notebooks of the docs again and store what they show: ONLY= names some
	$(QUIET) $(BIN)/python docs/notebooks.py $(ONLY)

site: setup ## build the documentation as a site in site/, and refuse broken links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

browse: setup ## open every page of the site in headless Chromium, as on a desktop and a phone, in light and dark
	$(BIN)/python docs/browser.py

walk: setup ## from the wheel, by the four tutorials, to verified files of three other networks
	$(QUIET) $(BIN)/python benchmarks/walk.py

bench-small: setup ## a tenth of the small matrix of experiments, on procedural images, with its leaderboard
	$(QUIET) $(BIN)/chipfit bench sweep qbench_zoo/matrix.yaml --study tenth --workers $(WORKERS)
	$(BIN)/chipfit bench board leaderboard.html

chaos: setup ## kill driver and workers of the small matrix 20 times: the table is that of an undisturbed sweep (an hour)
	$(QUIET) $(BIN)/python benchmarks/chaos.py qbench_zoo/matrix.yaml --study $(or $(STUDY),small) --kills $(or $(KILLS),20) --seed $(or $(SEED),0)

snapshots: setup ## write anew what the tests compare results with: for a change of results that was meant
	$(QUIET) $(BIN)/python -m tests.snapshots.test_snapshots
	$(QUIET) $(BIN)/python -m tests.snapshots.test_defaults
	$(QUIET) KERAS_BACKEND=torch $(BIN)/python -m tests.snapshots.test_keras_snapshots

bench: setup ## time and memory against the limits, and the exactness table
	$(BIN)/python benchmarks/ptq_speed.py
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/import_time.py

bench-accuracy: setup ## accuracy in 4, 3 and 2 bits without training, beside the limits (an hour)
	$(BIN)/python benchmarks/accuracy.py

bench-qat: setup ## what training with rounding costs, and the accuracy that it returns in 4 and 3 bits (hours)
	$(BIN)/python benchmarks/qat_speed.py --compiled
	$(BIN)/python benchmarks/qat.py

bench-algorithms: setup ## every training algorithm in three hardware settings at 4 bits, shortened
	$(BIN)/python benchmarks/qat.py --algorithms

fuzz: setup ## 10,000 cases of bad input: SEED=, MINUTES= and CASES= choose others
	$(QUIET) $(BIN)/python -m benchmarks.fuzz --seed $(or $(SEED),0) --minutes $(or $(MINUTES),60) --cases $(or $(CASES),10000)
	$(QUIET) $(BIN)/python -m benchmarks.fuzz.memory --seed $(or $(SEED),0)

random: setup ## prove COUNT random networks on each of ONNX Runtime and LiteRT, drawn with SEED: every integer
	$(QUIET) $(BIN)/python benchmarks/random_networks.py --count $(or $(COUNT),500) --seed $(or $(SEED),0)

.venv/zoo: constraints.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ "$$(grep '^timm==' constraints.txt)"
	touch $@

zoo: setup .venv/zoo ## 102 architectures on ONNX Runtime and LiteRT: those not yet in the table; ONLY= chooses
	$(BIN)/python -m benchmarks.zoo $(if $(ONLY),--only $(ONLY))
	$(BIN)/python docs/generate.py

.venv/gallery:
	$(BIN)/pip install --quiet --no-deps --target $@ ai-edge-quantizer==0.10.0 immutabledict litert-lm-builder

gallery: setup .venv/gallery ## trained networks, downloaded, beside the usual tools: ONLY=, REPOSITORIES=
	PYTHONPATH=.:.venv/gallery $(QUIET) $(BIN)/python -m benchmarks.gallery $(if $(ONLY),--only $(ONLY)) $(if $(REPOSITORIES),--repositories $(REPOSITORIES))
	$(BIN)/python docs/generate.py

mutants: setup ## share of 300 small defects that the tests notice: SEED=, COUNT=, MINUTES= and WORKERS= choose others
	$(QUIET) $(BIN)/python -m benchmarks.mutants --seed $(or $(SEED),0) --count $(or $(COUNT),300) --minutes $(or $(MINUTES),120) --workers $(WORKERS)

kills: setup ## kill 500 writers at random instants and load 300 times while others write: nothing may be lost
	$(QUIET) $(BIN)/python benchmarks/kills.py

silicon: setup ## the simulation beside what boards printed for MLPerf Tiny's keyword spotting; MIRRORS= names git directories
	$(QUIET) $(BIN)/python benchmarks/silicon.py $(if $(MIRRORS),--mirrors $(MIRRORS))

clean: ## remove what the targets above made, except .venv
	rm -rf .mutants build dist site demo_out out .pytest_cache .ruff_cache .mypy_cache .hypothesis
