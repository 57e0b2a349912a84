#!/bin/sh
# Both images run this as root: install.sh [INDEX]. It installs what `make setup-gpu` installs, in a copy of the
# checkout. INDEX is a mirror of the package index, for pip and uv.
set -eu
cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
if [ "${1:-}" ]; then export PIP_INDEX_URL="$1" UV_DEFAULT_INDEX="$1"; fi
# Triton and Inductor compile while a run starts: a compiler and Python.h. NCCL loads libibverbs to use InfiniBand.
apt-get update
apt-get install --yes --no-install-recommends \
    ca-certificates g++ ibverbs-providers libibverbs1 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
sh requirements/install-gpu.sh python3 .venv
# A job does not run as root: it reads these files, and cannot write bytecode next to them.
.venv/bin/python -m compileall -q src recipes
chmod -R a+rX .
.venv/bin/ppoctl --version
