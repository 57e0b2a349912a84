#!/bin/sh
# An environment for NVIDIA GPUs from nothing but Python and pip: install-gpu.sh PYTHON VENV
# What the folder held goes: both vLLM builds install one module, and would lie over each other. Wheels only, for glibc
# 2.31 or later (aarch64: 2.34). pip's places to find wheels are not handed on, as in install-cpu.sh: a torch for CPUs found there
# would be taken. Name another index or a folder of wheels by uv's own UV_DEFAULT_INDEX and UV_FIND_LINKS.
set -eu
python=$1
venv=$2
here=$(dirname "$0")
echo "$venv: making the environment"
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet uv==0.13.8
part() { # what the screen says, then what uv is to install
    echo "$venv: installing $1"
    shift
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" --only-binary :all: \
        --constraint "$here/gpu.txt" "$@"
}
part "torch and CUDA's libraries" torch
part "vLLM" vllm
part "Megatron-Core, Ray and MLflow" megatron-core ray mlflow
part "ppoctl, what else it requires, and the tools of its tests" --editable "$here/..[gpu,dev]"
touch "$venv/.gpu"
