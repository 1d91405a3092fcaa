# Each target does its own set-up: .venv is made once and again only when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients

.PHONY: serve test test-clients check bench clean

serve: $(STAMP)
	$(BIN)/penstock serve $(ARGS)

test: check
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/penstock bench $(ARGS)

# Heavy client libraries in a virtual environment of their own, against a server of the demo models.
test-clients: $(STAMP) $(CLIENTS)/.installed
	PENSTOCK_BIN=$(CURDIR)/$(BIN) $(CLIENTS)/bin/pytest -c tests/clients/pytest.ini tests/clients $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# A client that tests use. Its bounds on jiter exclude the openai SDK's present ones; it works with both.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps instructor==1.17.0
	touch $(STAMP)

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	touch $(CLIENTS)/.installed
