#!/usr/bin/env bash
# Make .venv-newest: as .venv, but with the newest torch, torchvision, torchaudio and timm there are.
# Composer's own bound on torch is not heeded: nothing else here installs it without one. Nothing to
# do costs milliseconds; `rm -r .venv-newest` looks for newer ones.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly pins=.venv/requirements.txt folder=.venv-newest
readonly newest="torch torchvision torchaudio timm"
. .setup/locks.sh

if cmp -s "$pins" "$folder/requirements.txt"; then exit 0; fi
rm -rf "$folder"
echo "newest: making $folder (some GB, minutes)"
.venv/bin/python -m venv "$folder"
without "${newest// /|}|triton|nvidia-.*" "$pins" >"$folder/others.txt"
install() {
    "$folder/bin/python" -m pip install --progress-bar off --quiet --disable-pip-version-check "$@" ||
        { echo "error: pip could not install $*; see above" >&2; exit 2; }
}
only setuptools "$pins" >"$folder/setuptools.txt"
# shellcheck disable=SC2086
for part in setuptools others; do install $from_lock --no-deps -r "$folder/$part.txt"; done
# shellcheck disable=SC2086
install --upgrade $newest
cp "$pins" "$folder/requirements.txt"
echo "newest: $folder is ready ($("$folder/bin/python" -m pip freeze | grep -E "^(${newest// /|})==" | xargs))"
