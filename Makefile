# Each target does its own set-up: .venv is made once and again only when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
AGENTS := $(CLIENTS)/agents
LOAD := $(CLIENTS)/load
RAY := $(CLIENTS)/ray
NODE := $(CLIENTS)/javascript

.PHONY: serve test test-clients check bench docs clean

serve: $(STAMP)
	$(BIN)/penstock serve $(ARGS)

# Three workers on two cores: many tests wait for processes. tests/conftest.py orders the files.
test: check
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/penstock bench $(ARGS)

# The pages of docs/ as a site with search, which the server then shows at /manual/.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Heavy client libraries in a virtual environment of their own, against a server of the demo models.
test-clients: export PENSTOCK_BIN := $(CURDIR)/$(BIN)
test-clients: export PENSTOCK_NODE_CLIENTS := $(CURDIR)/$(NODE)
test-clients: $(STAMP) $(CLIENTS)/.installed $(AGENTS)/.installed $(LOAD)/.installed $(RAY)/.installed $(NODE)/.installed
	$(CLIENTS)/bin/pytest -c tests/clients/pytest.ini tests/clients $(patsubst %,--ignore tests/clients/%,agents load ray) $(ARGS)
	$(AGENTS)/bin/pytest -c tests/clients/pytest.ini tests/clients/agents $(ARGS)
	$(LOAD)/bin/pytest -c tests/clients/pytest.ini tests/clients/load $(ARGS)
	PYTHONPATH=$(CURDIR)/$(RAY) $(BIN)/pytest -c tests/clients/pytest.ini --confcutdir tests/clients/ray tests/clients/ray $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# pip would compile 20,000 modules; most are never imported, and the others are compiled when they are, but only
# where this variable, which containers often set, is not set.
unexport PYTHONDONTWRITEBYTECODE

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	# A client that tests use. Its bounds on jiter exclude the openai SDK's present ones; it works with both.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps instructor==1.17.0
	touch $(STAMP)

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
$(RAY)/.installed: tests/clients/ray/requirements.txt constraints.txt | $(STAMP) $(CLIENTS)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade --target $(RAY) -r $<
	touch $@

# Without npm the tests of JavaScript clients are skipped.
$(NODE)/.installed: $(wildcard tests/clients/javascript/*) | $(CLIENTS)/.installed
	mkdir -p $(NODE)
	cp tests/clients/javascript/* $(NODE)
	! command -v npm > /dev/null || npm ci --prefix $(NODE) --ignore-scripts --no-audit --no-fund --silent
	touch $(NODE)/.installed
