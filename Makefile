# make quickstart   install what it needs and run the main job on this machine's CPU
# make test         install the development tools and pass every check that needs no GPU
# make help         list everything

PYTHON := .venv/bin/python
INPUTS := pyproject.toml environments/cpu.lock.txt environments/test-models.txt scripts/setup_venv.sh
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-cluster lint format lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

venv: .venv/.installed-dev ## Make .venv with the development tools

quickstart: .venv/.installed-quickstart ## Import, train, export and evaluate a small model on real pictures
	$(PYTHON) examples/quickstart/run.py

# compileall: where PYTHONDONTWRITEBYTECODE is set, as in many images, each of some hundred processes would compile it all.
test: lint ## Run every check that needs no GPU
	$(PYTHON) -m compileall -q llava_mcore tests
	$(PYTHON) -m pytest tests/e2e tests/parallel tests/unit -m 'not gpu and not cluster' -n 2 --dist loadfile --no-loadscope-reorder --durations 15

test-cluster: .venv/.installed-dev ## Run jobs that are killed and requeued; needs slurm-wlm and root for SLURM's
	$(PYTHON) -m pytest tests/e2e tests/slurm -m cluster --durations 5

lint: .venv/.installed-dev ## Style, types and the order of imports
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo

format: .venv/.installed-dev ## Rewrite the files in the project's style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lock: ## Write the versions that .venv holds to the lock file
	$(PYTHON) environments/lock.py > environments/cpu.lock.new
	mv environments/cpu.lock.new environments/cpu.lock.txt

clean: ## Remove caches and build outputs, but not .venv
	rm -rf build dist outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/.installed-dev: $(INPUTS)
	scripts/setup_venv.sh dev
	touch .venv/.installed-quickstart $@

.venv/.installed-quickstart: $(INPUTS)
	scripts/setup_venv.sh quickstart
	touch $@
