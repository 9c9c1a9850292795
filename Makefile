# This needs only Python 3.11 or newer and make; everything is installed into .venv.

PYTHON   ?= python3
RUN_MODE ?= data_parallel_naive
WORLD_SIZE ?= 2
MODES ?= data_parallel_naive data_parallel_overlap data_parallel_bucket_overlap
ARGS ?=

# This is an extra index in which pip finds a torch without gigabytes of CUDA. `auto` means PyTorch's CPU index,
# but only on Linux without an NVIDIA driver, and only if pip is configured with no other sources. An empty value
# means no extra index.
TORCH_INDEX_URL ?= auto
CPU_INDEX := https://download.pytorch.org/whl/cpu

# This file exists where Linux has the driver of an AMD GPU.
KFD ?= /dev/kfd

.DEFAULT_GOAL := help
TARGETS := run notebooks exercises compare diff site setup test lint check-runs check-exercises check-notebooks check-site containers slurm rehearse clean help
.PHONY: $(TARGETS) install

# A setting that a target does not read is refused, or, if it is in the environment, named.
SETTINGS := RUN_MODE WORLD_SIZE MODES ARGS FROM TO LINK LINK_DELAY CONTAINERS
READ_BY_run := RUN_MODE WORLD_SIZE ARGS LINK LINK_DELAY
READ_BY_compare := MODES WORLD_SIZE ARGS LINK LINK_DELAY CONTAINERS
READ_BY_diff := FROM TO
$(foreach name,notebooks exercises test check-runs check-exercises check-notebooks check-site containers slurm rehearse,$(eval READ_BY_$(name) := ARGS))
GOALS := $(filter $(TARGETS),$(MAKECMDGOALS))
READ := $(foreach name,$(GOALS),$(READ_BY_$(name)))
UNREAD = $(if $(GOALS),$(strip $(foreach name,$(filter-out $(READ),$(SETTINGS)),$(if $(filter $(1),$(origin $(name))),$(name)))))
$(if $(call UNREAD,command),$(error make $(GOALS) reads $(or $(READ),no settings), and not $(call UNREAD,command)))
$(if $(filter run compare,$(GOALS)),$(foreach name,$(filter RUN_MODE MODES CONTAINERS,$(call UNREAD,environment)), \
    $(warning make $(GOALS) reads $(READ), and not $(name))))

# The exact version of torch, on make's command line: it is installed into an environment of its own.
ifneq "$(origin TORCH)" "command line"
override TORCH :=
endif

# What the caller gives is text, not a program: make would expand ARGS='$(shell ...)' and run it.
$(foreach name,PYTHON $(SETTINGS) TORCH TORCH_INDEX_URL KFD,$(eval override $(name) := $$(value $(name))))

# Tests and launchers start hundreds of Python processes. Without bytecode files each would compile the workbook.
unexport PYTHONDONTWRITEBYTECODE

# pip has to install into .venv, wherever it installs otherwise.
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON
override export PIP_USER := 0

VENV  := .venv$(if $(TORCH),-torch-$(TORCH))
PY    := $(VENV)/bin/python
READY := $(VENV)/.ready

# `make run comm` would run the default lesson, and `make run MODE=comm` would ignore MODE.
NO_TARGET := $(filter-out $(TARGETS) install my_notebooks $(READY),$(MAKECMDGOALS))
ifneq "$(NO_TARGET)" ""
$(error There is no target '$(NO_TARGET)': make alone lists them. If it is a script, write: make run RUN_MODE=$(NO_TARGET))
endif
ifeq "$(origin MODE)" "command line"
$(error MODE is not a setting. Write: make run RUN_MODE=$(value MODE))
endif
$(foreach name,STEPS SIZE SEED LR,$(if $(filter command,$(origin $(name))), \
    $(error $(name) is not a setting. A script's options stand in ARGS: make run ARGS='--steps 3')))

run compare: export WORLD_SIZE := $(WORLD_SIZE)
run compare: export ARGS := $(ARGS)
run compare: export LINK := $(LINK)
run compare: export LINK_DELAY := $(LINK_DELAY)
run: export RUN_MODE := $(RUN_MODE)
run: $(READY) ## run a script on this machine: make run RUN_MODE=comm WORLD_SIZE=4 ARGS='--json'
	@exec env TORCHRUN='$(PY) -m lab.launch.torchrun' bash entrypoint.sh

notebooks: $(READY) my_notebooks ## open the notebooks in JupyterLab
	@$(PY) -m jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/my_notebooks $(ARGS)

# Copies without outputs, which would give the predictions away. They are the learner's, so they are made once.
my_notebooks: | $(READY)
	@$(PY) -m jupyter nbconvert --log-level=ERROR --to notebook --ClearOutputPreprocessor.enabled=True \
	    --output-dir $@.new notebooks/*.ipynb
	@mv $@.new $@

exercises: $(READY) ## show the next exercise; ARGS=watch grades it on each save (or list, check, hint, ...)
	@EXERCISES_BY_MAKE=1 $(PY) -m exercises $(ARGS)

compare: export MODES := $(MODES)
compare: export CONTAINERS := $(CONTAINERS)
compare: $(READY) ## run several modes, and show them beside each other: make compare MODES='zero1 zero3' (CONTAINERS=1)
	@exec $(PY) -m training.compare

diff: export FROM := $(FROM)
diff: export TO := $(TO)
diff: $(READY) ## show what a step changes in the code: make diff FROM=naive TO=overlap
	@$(PY) -m lab.what_changed "$$FROM" "$$TO"

site: $(READY) ## build the site of READMEs and notebooks
	@rm -rf site/_build/html
	@$(PY) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -c site -d site/_build/doctrees . site/_build/html
	@echo "The site is built: open site/_build/html/index.html in any browser."

setup: $(READY) ## make .venv and install requirements.txt into it

test: $(READY) ## run the tests: make test ARGS='-k ring'
	@$(PY) -m pytest $(or $(ARGS),-n 2 --dist loadfile)

lint: $(READY) ## ruff check, ruff format --check and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

check-runs: $(READY) ## test launchers, every RUN_MODE on up to 8 ranks, and kills at random moments
	@$(PY) -m pytest tests/end_to_end $(or $(ARGS),-n 2 --dist loadfile)

check-exercises: $(READY) ## grade every exercise untouched and solved, and see each mutant fail its test
	@$(PY) -m pytest tests/exercises/end_to_end $(or $(ARGS),-n 2)

check-notebooks: $(READY) ## execute the notebooks, and compare their outputs with those in the files
	@$(PY) -m pytest tests/notebooks $(or $(ARGS),-n 2 --maxschedchunk 1)

check-site: $(READY) ## build the site in a temporary folder, and test it and its pages in a browser
	@$(PY) -m pytest tests/site $(ARGS)

containers: $(READY) ## test the containers (needs a running Docker engine and docker-compose)
	@$(PY) -m pytest tests/containers $(ARGS)

slurm: $(READY) ## test scripts/slurm.sbatch with a real Slurm on this machine (needs slurm-wlm)
	@$(PY) -m pytest tests/slurm $(ARGS)

rehearse: $(READY) ## test the code for GPUs on your GPUs, else on fake ones (a C++ compiler, two minutes once)
	@$(PY) -m tests.fake_gpu $(ARGS)

clean: ## remove .venv, caches and the built site
	rm -rf $(VENV) site/_build .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */\1|/p' Makefile | while IFS='|' read -r target what; do printf '  make %-16s %s\n' "$$target" "$$what"; done

# .venv contains the path of this folder, so it is set up again after the folder was moved or copied.
ifneq "$(shell cat $(READY) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(READY)
endif

# flock, where there is one, keeps two set-ups from writing the same .venv; a Makefile is as good a lock as any file.
$(READY): requirements.txt pyproject.toml hatch_build.py
	@$(if $(shell command -v flock),flock -n Makefile )$(MAKE) --no-print-directory install || { \
	echo "Set-up has not ended. If another make sets up $(VENV) now, wait for it. Else run make again; if that fails too, run make clean and then make setup." >&2; exit 1; }

# The last line runs only after everything has worked, so an interrupted set-up starts again.
install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "The workbook needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1); choose another one: make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e $(VENV) ]; then echo "Setting up $(VENV) again: what it needs, or its place, has changed" >&2; \
	else echo "Setting up $(VENV) (once; torch is some 200 MB, a minute or two)" >&2; fi
	@rm -f $(READY)
	@trap '' INT; $(PYTHON) -m venv $(VENV) # after Ctrl-C make ends when this has ended, without Python's traceback
	@index='$(TORCH_INDEX_URL)'; \
	if [ "$$index" = auto ]; then \
	    index=; \
	    if [ "$$(uname -s)" = Linux ] && ! [ -e /proc/driver/nvidia/version ] && ! command -v nvidia-smi >/dev/null \
	        && ! $(PY) -m pip config list | grep -E '\.(index-url|extra-index-url|find-links|no-index)=' >/dev/null; \
	    then \
	        index=$(CPU_INDEX); \
	        if [ -e '$(KFD)' ]; then echo "There is an AMD GPU ($(KFD)), and this installs torch for the CPU; for the GPU: make clean setup TORCH_INDEX_URL=https://download.pytorch.org/whl/rocmX.Y (docs/setup.md)" >&2; fi; \
	    fi; \
	fi; \
	$(PY) -m pip install --quiet --quiet --disable-pip-version-check $${index:+--extra-index-url "$$index"} $(if $(TORCH),torch=='$(TORCH)') -r requirements.txt >&2
	@trap '' INT; $(PY) -c 'import platform, torch; print("Ready: Python", platform.python_version() + ", torch", torch.__version__)' >&2
	@echo '$(CURDIR)' > $(READY)
