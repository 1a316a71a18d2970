#!/usr/bin/env bash
# Put torch's builds for CPUs into .venv, in the pinned versions, and take out NVIDIA's libraries,
# most of its size. For images. The lock has no hashes of these builds: their index is trusted.
set -euo pipefail
cd "$(dirname "$0")/.."

. .setup/locks.sh
builds=$(pins requirements.txt | grep -E '^(torch|torchvision)==')
libraries=$(names .setup/requirements.lock | grep -xE "$of_torch")
# shellcheck disable=SC2086
.venv/bin/python -m pip install --no-deps --force-reinstall --progress-bar off \
    --index-url https://download.pytorch.org/whl/cpu $builds
# shellcheck disable=SC2086
.venv/bin/python -m pip uninstall --yes --quiet $libraries
