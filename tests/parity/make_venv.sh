#!/bin/sh
# Makes the environment of the peer library, apart from ours since its pins are others. Usage: make_venv.sh PYTHON FOLDER
# torch first, from our constraints; then what the two wheels ask for, except torch*; then the wheels without dependencies.
set -eu
python=$1 folder=$2
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: speculators needs Python 3.11 or newer, got $python; run make with PYTHON=python3.11"
    exit 2
fi
"$python" -m venv "$folder"
install() { "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"; }
install --constraint constraints.txt torch
install 'transformers==5.19.0' 'datasets>=4,<=5.1' 'numpy>=2,<2.5' 'loguru<=0.7.3' 'tqdm<=4.70.1' 'openai>=2' 'pydantic>=2' \
    pydantic-settings aiohttp click httpx huggingface-hub protobuf psutil rich safetensors typer
install --no-deps speculators==0.9.0 hs-connectors==0.9.0
