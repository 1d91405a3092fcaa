# Each target does its own set-up: .venv gets the product for `make serve`, and what the tests need on top of it for the
# others; again only when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRODUCT := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
CLIENTS := .venv-clients
AGENTS := $(CLIENTS)/agents
LOAD := $(CLIENTS)/load
RAY := $(CLIENTS)/ray
NODE := $(CLIENTS)/javascript

.PHONY: serve test test-clients check bench docs clean

serve: $(PRODUCT)
	$(BIN)/penstock serve $(ARGS)

# Four workers on two cores: many tests wait for processes. tests/conftest.py orders the files.
test: check
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV)
	$(BIN)/penstock bench $(ARGS)

# The pages of docs/ as a site with search, which the server then shows at /manual/.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Heavy client libraries in a virtual environment of their own, against a server of the demo models.
test-clients: export PENSTOCK_BIN := $(CURDIR)/$(BIN)
test-clients: export PENSTOCK_NODE_CLIENTS := $(CURDIR)/$(NODE)
test-clients: $(DEV) $(CLIENTS)/.installed $(AGENTS)/.installed $(LOAD)/.installed $(RAY)/.installed $(NODE)/.installed
	$(CLIENTS)/bin/pytest -c tests/clients/pytest.ini tests/clients $(patsubst %,--ignore tests/clients/%,agents load ray) $(ARGS)
	$(AGENTS)/bin/pytest -c tests/clients/pytest.ini tests/clients/agents $(ARGS)
	$(LOAD)/bin/pytest -c tests/clients/pytest.ini tests/clients/load $(ARGS)
	PYTHONPATH=$(CURDIR)/$(RAY) $(BIN)/pytest -c tests/clients/pytest.ini --confcutdir tests/clients/ray tests/clients/ray $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# pip would compile 20,000 modules; most are never imported, and the others are compiled when they are, but only
# where this variable, which containers often set, is not set.
unexport PYTHONDONTWRITEBYTECODE

$(PRODUCT): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

# Not after $(PRODUCT), whose packages pip would look at twice.
$(DEV): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	# A client that tests use. Its bounds on jiter exclude the openai SDK's present ones; it works with both.
	$(PIP) --no-deps instructor==1.17.0
	touch $(PRODUCT) $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	touch $(CLIENTS)/.installed

# Agents, lm-eval and LiteLLM, and load generators: their versions of shared dependencies exclude those of the other clients.
$(AGENTS)/.installed $(LOAD)/.installed: $(CLIENTS)/%/.installed: tests/clients/%/requirements.txt | $(CLIENTS)/.installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# Ray beside the project's own environment: its workers run our servers.
$(RAY)/.installed: tests/clients/ray/requirements.txt constraints.txt | $(DEV) $(CLIENTS)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade --target $(RAY) -r $<
	touch $@

# Without npm the tests of JavaScript clients are skipped.
$(NODE)/.installed: $(wildcard tests/clients/javascript/*) | $(CLIENTS)/.installed
	mkdir -p $(NODE)
	cp tests/clients/javascript/* $(NODE)
	! command -v npm > /dev/null || npm ci --prefix $(NODE) --ignore-scripts --no-audit --no-fund --silent
	touch $(NODE)/.installed
