#!/usr/bin/env bash
# beside.sh newest: make .venv-newest, as .venv, but with the newest torch, torchvision and timm there
# are, whatever Composer's bounds are; `rm -r .venv-newest` looks for newer ones.
# beside.sh oldest: make .venv-oldest, with the oldest torch that is tested.
# Nothing to do costs milliseconds.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly kind=$1 folder=.venv-$1
readonly newest="torch torchvision timm"
. .setup/locks.sh

wanted() { cat .venv/requirements.txt "$floor"; }
if cmp -s <(wanted) "$folder/requirements.txt"; then exit 0; fi
rm -rf "$folder"
echo "$kind: making $folder (some GB, minutes)"
.venv/bin/python -m venv "$folder"
if [ "$kind" = newest ]; then
    without "${newest// /|}|$of_torch" .venv/requirements.txt >"$folder/pins.txt"
else
    with_floor .venv/requirements.txt >"$folder/pins.txt"
fi
install() {
    "$folder/bin/python" -m pip install --progress-bar off --quiet --disable-pip-version-check "$@" ||
        { echo "error: pip could not install $*; see above" >&2; exit 2; }
}
only setuptools .venv/requirements.txt >"$folder/setuptools.txt"
# shellcheck disable=SC2086
for part in setuptools pins; do install $from_lock --no-deps -r "$folder/$part.txt"; done
# shellcheck disable=SC2086
[ "$kind" = oldest ] || install --upgrade $newest
wanted >"$folder/requirements.txt"
echo "$kind: $folder is ready ($("$folder/bin/python" -m pip freeze | grep -E "^(${newest// /|})==" | xargs))"
