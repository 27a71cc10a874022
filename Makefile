# make demo    install, tokenize, train four small models, measure and compare them
# make test    install and run all but the slow tests
# make test-all  all tests
# make test-oldest  the tests with the oldest libraries that setup.py allows (torch, too, with TORCH=torch==2.11.0)
# make torture kill, damage, fill disks: about an hour; resumes where it was stopped
# make check   linter, formatter, type checker
# make pkm-table-2, pkm-headline, memory-plus-steps, ngram-controls, memoryformer-table-5, ...: a table or figure of a paper (recipes/*/grids)
#              SCALE=cpu|gpu|paper; CORPUS=FOLDER with train.txt, valid.txt and test.txt (or .gz, .zst), the first time;
#              TASK_DATA=FOLDER with the rows of zero-shot tasks; JOBS=N runs at a time, or DEVICES=0,1,... one per GPU
# make demo-block: what block, optimizer and memory are each worth, on the demo's text; two hours on two cores with JOBS=2
# make worth-width-512, worth-width-256, worth-long: what a memory is worth (recipes/worth); hours. CORPUS=FOLDER with
#              train*.txt, valid.txt and test.txt (or .zst): 10 million tokens for the widths, 68 million for worth-long;
#              JOBS=N (widths) or make -j N (worth-long) runs at a time; SET="-s KEY=VALUE" for all runs
# make controls-memories, -vocabulary, -epochs, -rates, -rates-of-values: a memory beside a modern block (recipes/controls);
#              CORPUS=FOLDER as for worth-long
# make pretrained-continued: a small model of books that comes along, trained further with a memory or without
#              (recipes/pretrained); CORPUS=FOLDER with train.txt, valid.txt and test.txt (or .zst) of novels
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PKMLM := $(BIN)/pkmlm
# Where trials run and are recorded; a file system in memory is faster.
TORTURE ?= torture
MODELS := dense product-key ngram hash
RUNS := $(MODELS:%=demo/runs/%)

# The tables and figures of the papers.
SCALE ?= cpu
JOBS ?= 1
DEVICES ?=
TOKENS ?= data/novels-4k
TASK_DATA ?=
BOOKS ?= data/books-8k
SET ?=
CONTROLS = data/controls/2k/index.json data/controls/8k/index.json data/controls/32k/index.json data/controls/eighth/index.json
AT_A_TIME = $(if $(DEVICES),--device $(DEVICES),--jobs $(JOBS))
split = $(firstword $(wildcard $(CORPUS)/$(1).txt $(CORPUS)/$(1).txt.zst $(CORPUS)/$(1).txt.gz))

# Refuses a CORPUS without the text of $@. $(1): the name of its training text; $(2): the page on it.
define NEED
test -n "$(wildcard $(CORPUS)/$(1) $(CORPUS)/$(1).gz $(CORPUS)/$(1).zst)" -a -n "$(call split,valid)" -a -n "$(call split,test)" || { \
  echo "error: no $@, nor $(1), valid.txt and test.txt in CORPUS=$(CORPUS)"; \
  echo "hint: add CORPUS=FOLDER with these (or .gz, .zst); see $(2)"; exit 2; }
endef

.PHONY: demo test test-all test-oldest torture check golden clean worth-long

demo: $(RUNS:%=%/eval/done) demo/probe.txt
	$(PKMLM) compare $(RUNS) --plots demo/plots --force
	$(PKMLM) usage-report demo/runs/product-key demo/runs/ngram demo/runs/hash --plots demo/plots --force
	@echo "The plots are in demo/plots; the runs in demo/runs."
	@cat demo/probe.txt

demo/probe.txt: demo/runs/product-key/done demo/runs/dense/done
	$(PKMLM) probe demo/runs/product-key --dense demo/runs/dense --fit-tokens 200000 > $@.part
	@mv $@.part $@

$(RUNS:%=%/eval/done): demo/runs/%/eval/done: demo/runs/%/done
	$(PKMLM) eval demo/runs/$*
	@touch $@

demo/runs/product-key/done: RECIPE = recipes/demo.yaml
demo/runs/dense/done: RECIPE = recipes/demo-dense.yaml
demo/runs/ngram/done: RECIPE = recipes/demo-ngram.yaml
demo/runs/hash/done: RECIPE = recipes/demo-hash.yaml
$(RUNS:%=%/done): demo/tokens/index.json
	$(PKMLM) train $(RECIPE) -o $(@D)
	@touch $@

demo/tokens/index.json: | .venv/installed
	$(PKMLM) tokenize recipes/demo/train.txt.zst --valid recipes/demo/valid.txt.zst --test recipes/demo/test.txt.zst \
	  --separator '\n\n\n' --vocab-size 4096 -o demo/tokens

# The test files in this order, so that the longest (commands, several processes) do not come last.
PYTEST = -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow"

test-all: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

test-oldest: .venv-oldest/installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python $(PYTEST)

torture: .venv/installed-dev
	$(BIN)/python -m tests.torture --folder $(TORTURE)

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pkmlm

golden: .venv/installed-dev
	$(BIN)/python -m tests.golden.test_curves

SWEEP = $(PKMLM) sweep $< -o sweeps/$@-$(SCALE) --scale $(SCALE) $(AT_A_TIME) -s data.dir=$(TOKENS) $(SET)

demo-%: recipes/demo/grids/%.yaml demo/tokens/index.json
	$(PKMLM) sweep $< -o sweeps/$@ $(AT_A_TIME)

pkm-%: recipes/pkm/grids/%.yaml $(TOKENS)/index.json
	$(SWEEP)

memory-plus-%: recipes/memory-plus/grids/%.yaml $(TOKENS)/index.json
	$(SWEEP)

peer-%: recipes/peer/grids/%.yaml $(TOKENS)/index.json
	$(SWEEP)

ngram-%: recipes/ngram/grids/%.yaml $(TOKENS)/index.json
	$(SWEEP)

# A model of books that comes along, as others publish theirs: trained further on the novels, with its tokenizer.
pretrained-%: recipes/pretrained/grids/%.yaml data/novels-books-4k/index.json
	$(PKMLM) sweep $< -o sweeps/$@ $(AT_A_TIME) $(SET)

runs/books-128/run.json: | .venv/installed
	$(PKMLM) import recipes/pretrained/books-128 -o $(@D)

worth-%: recipes/worth/grids/%.yaml $(BOOKS)/index.json
	$(PKMLM) sweep $< -o sweeps/$@ $(AT_A_TIME) -s data.dir=$(BOOKS) $(SET)

# Models at a CPU's size unless SCALE=gpu, and what they are trained on: all books, or ten megabytes of them.
controls-memories: TOKENS = $(BOOKS)
controls-memories: recipes/controls/grids/memories.yaml $(BOOKS)/index.json
	$(SWEEP)

controls-%: recipes/controls/grids/%.yaml $(CONTROLS)
	$(PKMLM) sweep $< -o sweeps/$@ $(AT_A_TIME) $(SET)

# One run per model at a constant rate. At each of LONG_STEPS, a copy takes a tenth more steps while the rate decays, and
# is measured. Finished parts are skipped, stopped ones resumed. OMP_NUM_THREADS=1 make -j 5 trains 5 at a time.
LONG_MODELS ?= dense dense-2L product-key product-key-slow-keys memory-plus
LONG_STEPS ?= 500 1000 2500 5000 10000 15000
LONG = sweeps/worth-long

worth-long: $(foreach steps,$(LONG_STEPS),$(LONG_MODELS:%=$(LONG)/%-$(steps)/eval/done))
	$(PKMLM) compare $(foreach model,$(LONG_MODELS),$(LONG)/$(model) $(LONG_STEPS:%=$(LONG)/$(model)-%)) \
	  --over tokens --plots $(LONG)/plots --plot-log --force

# A branch: $(1) the model, $(2) its steps, $(3) the steps of the branch before.
define LONG_BRANCH
$(LONG)/$(1)-$(2): | $(BOOKS)/index.json $(3:%=$(LONG)/$(1)-%)
	$(PKMLM) train recipes/worth/long-$(1).yaml -o $(LONG)/$(1) -s data.dir=$(BOOKS) $(SET) -s train.steps=$(2)
	@test "$$$$(cat $(LONG)/$(1)/latest)" = "$$$$(printf step-%08d $(2))" || { \
	  echo "error: $(LONG)/$(1) has gone beyond step $(2), of which there is no branch"; exit 2; }
	rm -rf $$@.part
	cp -r $(LONG)/$(1) $$@.part
	mv $$@.part $$@

$(LONG)/$(1)-$(2)/eval/done: DECAY = $$(shell expr \( $(2) + 9 \) / 10)
$(LONG)/$(1)-$(2)/eval/done: | $(LONG)/$(1)-$(2)
	$(PKMLM) train recipes/worth/long-$(1).yaml -o $(LONG)/$(1)-$(2) -s data.dir=$(BOOKS) $(SET) \
	  -s train.steps=$$(shell expr $(2) + $$(DECAY)) -s optim.decay_steps=$$(DECAY)
	$(PKMLM) eval $(LONG)/$(1)-$(2)
	$(if $(filter dense% modern,$(1)),,$(PKMLM) usage-report $(LONG)/$(1)-$(2))
	touch $$@
endef

$(foreach model,$(LONG_MODELS),$(eval BEFORE :=)$(foreach steps,$(LONG_STEPS),\
  $(eval $(call LONG_BRANCH,$(model),$(steps),$(BEFORE)))$(eval BEFORE := $(steps))))

$(BOOKS)/index.json: | .venv/installed
	@$(call NEED,train*.txt,recipes/worth/README.md)
	$(PKMLM) tokenize $(sort $(wildcard $(CORPUS)/train*.txt*)) --valid $(call split,valid) --test $(call split,test) \
	  --separator '\n\n\n' --vocab-size 8192 -o $(BOOKS)

data/controls/ten.txt: | .venv/installed
	@$(call NEED,train*.txt,recipes/controls/README.md)
	$(BIN)/python recipes/controls/sample.py $(sort $(wildcard $(CORPUS)/train*.txt*)) --megabytes 10 -o $@

data/controls/eighth.txt: data/controls/ten.txt
	$(BIN)/python recipes/controls/sample.py $< --megabytes 1.25 -o $@

data/controls/2k/index.json: VOCABULARY = --vocab-size 2048
data/controls/8k/index.json: VOCABULARY = --vocab-size 8192
data/controls/32k/index.json: VOCABULARY = --vocab-size 32768
data/controls/eighth/index.json: VOCABULARY = --tokenizer data/controls/8k
data/controls/eighth/index.json: data/controls/eighth.txt | data/controls/8k/index.json
data/controls/2k/index.json data/controls/8k/index.json data/controls/32k/index.json: data/controls/ten.txt
$(CONTROLS):
	@$(call NEED,train*.txt,recipes/controls/README.md)
	$(PKMLM) tokenize $< --valid $(call split,valid) --test $(call split,test) --separator '\n\n\n' $(VOCABULARY) -o $(@D)

memoryformer-figure-1: recipes/memoryformer/grids/figure-1.yaml | .venv/installed
	$(PKMLM) sweep $< -o sweeps/$@

memoryformer-%: recipes/memoryformer/grids/%.yaml $(TOKENS)/index.json
	$(SWEEP) $(if $(TASK_DATA),--task-data $(TASK_DATA))

memoryformer-figure-4: recipes/memoryformer/grids/figure-4.yaml $(TOKENS)/index.json
	$(SWEEP)
	$(PKMLM) usage-report sweeps/$@-$(SCALE)/cells/* --plots sweeps/$@-$(SCALE) --force

$(TOKENS)/index.json: | .venv/installed
	@$(call NEED,train.txt,recipes/README.md)
	$(PKMLM) tokenize $(call split,train) --valid $(call split,valid) --test $(call split,test) \
	  --separator '\n\n\n' --vocab-size 4096 -o $(TOKENS)

data/novels-books-4k/index.json: | runs/books-128/run.json
	@$(call NEED,train.txt,recipes/pretrained/README.md)
	$(PKMLM) tokenize $(call split,train) --valid $(call split,valid) --test $(call split,test) \
	  --separator '\n\n\n' --tokenizer recipes/pretrained/books-128 -o $(@D)

# torch first and by itself, in the tested version; TORCH= may give another build, with options for pip.
.venv/installed: setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

# pip installs the lowest version of a range only under a constraint. torch is apart: old builds take gigabytes.
.venv-oldest/installed: setup.py
	$(PYTHON) -m venv .venv-oldest
	sed -nE 's/^.*"([a-zA-Z0-9-]+)>=([0-9.]+),.*$$/\1==\2/p' setup.py | grep -v '^torch==' > .venv-oldest/constraints
	.venv-oldest/bin/python -m pip install -q --disable-pip-version-check $(TORCH)
	.venv-oldest/bin/python -m pip install -q --disable-pip-version-check -c .venv-oldest/constraints -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest demo *.egg-info
