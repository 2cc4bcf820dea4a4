# make quickstart   install what it needs and run the main job on this machine's CPU
# make demo         train a small vision-language model with real weights; talk to it afterwards
# make test         install the development tools and pass every check that needs no GPU
# make venv-gpu     install everything for GPUs, without a container
# make help         list everything

PYTHON := .venv/bin/python
NEWEST := .venv-newest
GPU := .venv-gpu
PAGE := .venv-page
DOCS := .venv-docs
INPUTS := pyproject.toml environments/test-models.txt scripts/setup_venv.sh
# Tests wait for processes of their own half of the time: four workers fill two cores.
PYTEST := -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 15
USUAL := 'not gpu and not cluster and not long'
# Tests run several processes at once.
test test-long test-newest test-cluster test-all tests: export OMP_NUM_THREADS ?= 1
# Many images set it; then each of some hundred processes would compile everything.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv venv-gpu quickstart demo page docs test test-long test-newest test-cluster test-all tests lint format lock lock-newest clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

venv: .venv/.installed-dev ## Make .venv with the development tools

venv-gpu: $(GPU)/.installed ## Make .venv-gpu with Transformer Engine; needs the toolkit of CUDA 13.0 and g++

quickstart: .venv/.installed-quickstart ## Import, train, export and evaluate a small model on real images
	$(PYTHON) examples/quickstart/run.py

demo: .venv/.installed-demo ## Train DINOv2-S and SmolLM2-135M on emoji in two stages, and ask about held-out ones
	$(PYTHON) examples/small-vlm/run.py

page: $(PAGE)/.installed ## Make .venv-page with Gradio, for the page of `demo`

docs: $(DOCS)/.installed ## Build the documentation site in build/docs/site; a warning is an error
	$(DOCS)/bin/python environments/docs_site.py

test: lint ## Run every check that needs no GPU
	$(PYTHON) $(PYTEST) -m $(USUAL) tests/e2e tests/parallel tests/unit

test-long: .venv/.installed-dev ## Run the tests that take long
	$(PYTHON) $(PYTEST) -m 'long and not gpu and not cluster' tests/e2e tests/parallel tests/unit

unit = $(foreach name,$(1),$(wildcard tests/unit/*/test_$(name).py))

# What versions of torch and transformers change. The other tests are about our own logic (rules, flags, messages, locks,
# packing, the importer, data checks, SLURM), about processes, about files, or about layouts that agree with each other.
# Names and numbers: weights there and back, logits and gradients beside Hugging Face's, for every class and family.
ACROSS_VERSIONS := 'tests/parallel/test_layouts.py::test_parity_and_round_trip[1-1]'
ACROSS_VERSIONS += $(call unit,activations anyres_model audio check_model classes conversion \
	families idefics2 import_export linear_cross_entropy llava_model qlora qwen rotary_factor vision_features)
# Tokens: chat templates, tokenizers, processors; the models that `build` makes of parts.
ACROSS_VERSIONS += $(call unit,build_classes chat_templates data_assets data_chat)
# Every patch and private name in llava_mcore/compat, what starts without CUDA, the table of versions.
ACROSS_VERSIONS += $(call unit,compat cpu gloo versions)
# The whole way: training beside plain torch, a resumed run, answers and the server.
ACROSS_VERSIONS += 'tests/parallel/test_resume_layouts.py::test_resumed_at_another_layout[tied]'
ACROSS_VERSIONS += tests/parallel/test_training.py::test_one_process_trains_as_plain_hugging_face
ACROSS_VERSIONS += $(call unit,answering data_loader serve_answers)

# Long tests too, but without thousands of sizes of images: the shorter tests of the same files compare with the same processors.
test-newest: $(NEWEST)/.installed-dev ## Run the tests with the newest versions that pyproject.toml allows
	$(NEWEST)/bin/python $(PYTEST) -m 'not gpu and not cluster' -k 'not thousands_of_sizes and not 4000 and not 4014' $(ACROSS_VERSIONS)

# In one run, so that usual and long tests of a file share what they compare with. The jobs that are killed and requeued
# mostly wait: the tests of the newest versions run beside them.
test-all: lint tests ## Run all tests that need no GPU: those of test, test-long, test-newest and test-cluster

tests: .venv/.installed-dev ## The same without lint, which CI runs beside the docs
	$(PYTHON) $(PYTEST) -m 'not gpu and not cluster' tests/e2e tests/parallel tests/unit
	$(MAKE) --jobs=2 --output-sync test-newest test-cluster

test-cluster: .venv/.installed-dev ## Run jobs that are killed and requeued; needs slurm-wlm and root for SLURM's
	$(PYTHON) -m pytest tests/e2e tests/slurm -m cluster --durations 5

lint: .venv/.installed-dev ## Check style, types, the order of imports, spelling and wording
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/codespell
	.venv/bin/codespell --builtin en-GB_to_en-US docs *.md
	$(PYTHON) environments/wording.py

format: .venv/.installed-dev ## Rewrite the files in the project's style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lock: ## Write the versions that .venv holds to the lock file
	$(PYTHON) environments/lock.py $@ > environments/cpu.lock.new
	mv environments/cpu.lock.new environments/cpu.lock.txt

lock-newest: ## Install the newest versions that pyproject.toml allows, and write them to their lock file
	rm -rf $(NEWEST)
	scripts/setup_venv.sh dev $(NEWEST) none
	$(NEWEST)/bin/python environments/lock.py $@ > environments/newest.lock.new
	mv environments/newest.lock.new environments/newest.lock.txt
	touch $(NEWEST)/.installed-dev

clean: ## Remove caches and build outputs, but no environments
	rm -rf .cache build dist outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

.venv/.installed-dev: $(INPUTS) environments/cpu.lock.txt
	scripts/setup_venv.sh dev
	touch .venv/.installed-quickstart .venv/.installed-demo $@

.venv/.installed-demo: $(INPUTS) environments/cpu.lock.txt
	scripts/setup_venv.sh small-vlm
	touch $@

.venv/.installed-quickstart: $(INPUTS) environments/cpu.lock.txt
	scripts/setup_venv.sh quickstart
	touch $@

$(NEWEST)/.installed-dev: $(INPUTS) environments/newest.lock.txt
	scripts/setup_venv.sh dev $(NEWEST) environments/newest.lock.txt
	touch $@

$(GPU)/.installed: $(INPUTS) environments/cpu.lock.txt environments/gpu.lock.txt
	scripts/setup_venv.sh gpu $(GPU)
	touch $@

$(PAGE)/.installed: environments/page.lock.txt scripts/setup_venv.sh
	scripts/setup_venv.sh page $(PAGE) environments/page.lock.txt
	touch $@

$(DOCS)/.installed: environments/docs.lock.txt scripts/setup_venv.sh
	scripts/setup_venv.sh docs $(DOCS) environments/docs.lock.txt
	touch $@
