#!/bin/sh
# An environment for NVIDIA GPUs from nothing but Python and pip: install-gpu.sh PYTHON VENV
# What the folder held goes: both vLLM builds install one module, and would lie over each other. Wheels only, for glibc
# 2.31 or later. pip's places to find wheels are not handed on, as in install-cpu.sh: a torch for CPUs found there
# would be taken. Name another index or a folder of wheels by uv's own UV_DEFAULT_INDEX and UV_FIND_LINKS.
set -eu
python=$1
venv=$2
here=$(dirname "$0")
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet uv==0.13.8
"$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" --only-binary :all: \
    --constraint "$here/gpu.txt" --editable "$here/..[gpu,dev]"
touch "$venv/.gpu"
