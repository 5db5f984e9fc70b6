# make demo    set up and compare seven methods on handwritten digits, 50 clients with two classes each
# make picture set up and show the idea on three conflicting clients (writes the README's picture)
# make test    set up and run format check, lint, type check and all tests
# make docs    set up and build the site, in build/site (warnings are errors)
# make bench   measure every rule against the memory floor and the published form
# make format  rewrite the sources in the house style

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo picture test docs bench format clean

# The environment is rebuilt when it is missing, half-made, or older than what it was made from.
$(STAMP): pyproject.toml constraints.txt Makefile
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/evenhand compare fedavg qffl:q=1 fedfv fedlf adafed fedfa even --data digits --partition pat:2 --clients 50 \
		--split 0.5,0,0.5 --cohort 10 --batch-size 10 --lr 0.2 --rounds 100

picture: $(STAMP)
	$(BIN)/python examples/three_clients.py

test: export PYTHONDONTWRITEBYTECODE = # many tests start processes, which need not compile everything anew
test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadgroup

docs: $(STAMP)
	$(BIN)/python docs/site/make_site.py

bench: $(STAMP)
	$(BIN)/python benchmarks/rules.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
