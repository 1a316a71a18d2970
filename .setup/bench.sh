#!/usr/bin/env bash
# Put the loaders that `make bench-loader` compares ours with into .venv-bench, beside .venv: a folder
# that only the benchmark's own processes have on their path. Nothing to do costs milliseconds.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly pins=.setup/bench.lock folder=.venv-bench
. .setup/locks.sh
check_lock tests/benchmarks/requirements.txt "$pins"

if cmp -s "$pins" "$folder/requirements.txt"; then exit 0; fi
rm -rf "$folder" "$folder.partial"
.venv/bin/python -m pip install --progress-bar off --quiet --disable-pip-version-check \
    --require-hashes --no-deps --target "$folder.partial" -r "$pins" ||
    { rm -rf "$folder.partial"; echo "error: pip could not install $pins; see above" >&2; exit 2; }
cp "$pins" "$folder.partial/requirements.txt"
mv "$folder.partial" "$folder"
echo "bench-setup: $folder is ready"
