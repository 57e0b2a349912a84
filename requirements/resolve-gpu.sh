#!/bin/sh
# Every package that the extras gpu and dev bring under the Pythons it supports, wheels only: resolve-gpu.sh UV CONSTRAINTS
# Nothing is downloaded but metadata. A package under two versions has two lines: then Pythons do not agree.
set -eu
uv=$1
constraints=$2
here=$(dirname "$0")
lines=
for python in 3.11 3.12 3.13; do
    found=$("$uv" pip compile --quiet --extra gpu --extra dev --constraint "$constraints" --only-binary :all: \
        --python-version "$python" --python-platform x86_64-manylinux_2_31 \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$here/../pyproject.toml") || {
        echo "python $python: no solution" >&2
        exit 1
    }
    lines="$lines$found
"
done
printf %s "$lines" | LC_ALL=C sort -u
