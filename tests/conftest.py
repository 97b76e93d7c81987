"""Environment of every test: no network, one thread where the caller did not choose, no forked tokenizer warnings."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
