#!/bin/sh
# An environment for CPU from nothing but Python and pip: install-cpu.sh PYTHON VENV
# uv resolves and links in seconds; it does not read pip's settings, so pip's places to find wheels are handed on.
# Compiled once here, imports take half as long in every process that starts later.
set -eu
python=$1
venv=$2
here=$(dirname "$0")
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet uv==0.13.8
find_links=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
"$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" ${find_links:+--find-links "$find_links"} \
    --override "$here/cpu-overrides.txt" --constraint "$here/cpu.txt" --editable "$here/..[cpu,dev]"
