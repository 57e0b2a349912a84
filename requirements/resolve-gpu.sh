#!/bin/sh
# Every package that the extras gpu and dev bring, wheels only: resolve-gpu.sh UV CONSTRAINTS [PLATFORM ...]
# Each supported Python is resolved on each platform. Nothing is downloaded but metadata. A package under two versions
# has two lines: then Pythons or platforms do not agree.
set -eu
uv=$1
constraints=$2
shift 2
here=$(dirname "$0")
[ $# -gt 0 ] || set -- x86_64-manylinux_2_31 aarch64-manylinux_2_34
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
for platform; do
    for python in 3.11 3.12 3.13; do # in parallel: the time is that of the network
        "$uv" pip compile --quiet --extra gpu --extra dev --constraint "$constraints" --only-binary :all: \
            --python-version "$python" --python-platform "$platform" \
            --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$here/../pyproject.toml" \
            >"$folder/$platform-$python" || echo "python $python on $platform: no solution" | tee "$folder/failed" >&2 &
    done
done
wait
[ ! -e "$folder/failed" ] || exit 1
LC_ALL=C sort -u "$folder"/*
