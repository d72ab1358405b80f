# Two commands do everything: `make book` and `make test`. `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup book test soak serve figure reference verify bench lint pdf release clean lock
PY := .venv/bin/python
SYSTEM_PYTHON ?= python3
export TORCH TORCH_VERSION TORCH_INDEX PRESET
export JUPYTER_PLATFORM_DIRS := 1
CORES := $(shell getconf _NPROCESSORS_ONLN)

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: ## the environment in .venv, with every version pinned (the other targets call it)
	@$(SYSTEM_PYTHON) tools/bootstrap.py

book: setup ## run what changed, build the site, say where to open it
	@$(PY) -m doit -n $(CORES) book && $(PY) -m nqflib.claims summary && echo "Open $(CURDIR)/_build/html/index.html or run: make serve"

test: setup ## all tests, those in a real browser too
	@$(PY) tools/chromium.py && $(PY) -m pytest -n $(CORES) --dist loadfile $(T)

soak: setup ## twenty real kills each of pretraining and of Lanczos, resumed to the same bits; intervals over a hundred seeds
	@NQF_KILLS=20 NQF_SEEDS=100 $(PY) -m pytest tests/language_model/test_kills.py tests/test_lanczos_resume.py tests/test_tails.py

serve: setup ## the built book at 127.0.0.1:8000, with a form on every page that runs its figures again (PORT=...)
	@$(PY) -m nqflib.serve --port $(or $(PORT),8000)

figure: setup ## one figure with your parameters: make figure F=nqf/fig3_features P="eps=1e-8"
	@$(PY) -m nqflib.runner figure $(F) $(P)

reference: setup ## run a page at a larger scale and keep its numbers and curves in data/reference: make reference F=... P="preset=evening"
	@$(PY) -m nqflib.reference $(F) $(P)

verify: setup ## judge every claim of the executed book; exit 1 if a verdict is not the expected one
	@$(PY) -m nqflib.claims verify

bench: setup ## timings beside peers: both sides interleaved, one thread, medians
	@$(PY) tools/bench.py

lint: setup ## format, lint, types, and no machine paths in tracked files
	@$(PY) tools/lint.py

pdf: setup ## the whole book as _build/nqf-companion.pdf (after make book)
	@$(PY) tools/pdf.py

release: setup ## dist/: the site as a zip for readers without a network, wheel, sdist, checksums (after make book)
	@$(PY) tools/release.py

lock: setup ## pin anew what pyproject.toml asks for (needs uv)
	@$(PY) tools/lock.py

clean: ## remove everything that was built, but not .venv
	@rm -rf _build dist book/notebooks book/_toc.yml
