#!/usr/bin/env bash
# Make .venv hold what requirements.txt says, from files whose hashes are in the lock beside this;
# `make setup` runs this before every other target.
# Nothing to do costs milliseconds: .venv/.installed repeats what was installed, and is compared.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v flock >/dev/null; then  # two `make` at once: the second waits for the first
    exec 9<"$0"
    flock -n 9 || { echo "setup: waiting for another make setup to finish"; flock 9; }
fi

readonly stamp=.venv/.installed choice=.venv/.torch ffcv_log=.venv/ffcv.log
lock=.setup/requirements.lock
# TORCH=2.7 counts for later targets too, until TORCH=newest
torch=${TORCH:-$(cat "$choice" 2>/dev/null || echo newest)}
log=""  # made by mktemp at the first output
. .setup/locks.sh
check_lock requirements.txt "$lock"
check_lock .setup/torch2.7.txt "$floor"
readonly system_packages="pkg-config g++ python3-dev libopencv-dev libturbojpeg0-dev"

say() { echo "setup: $*"; }
fail() { echo "error: $*" >&2; exit 2; }

# watch WHAT COMMAND…: run it with its output in the log, and say what it is at and for how long.
watch() {
    local what=$1 started=$SECONDS said=$SECONDS child status=0
    shift
    [ -n "$log" ] || log=$(mktemp "${TMPDIR:-/tmp}/pospre-setup.XXXXXX")
    "$@" >"$log" 2>&1 9<&- &
    child=$!
    trap 'kill "$child" 2>/dev/null; rm -f "$log"; echo; say "stopped; run make again to continue"; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.5
        local line="setup: $what, $((SECONDS - started)) s: $(grep -av '^ \|^WARNING' "$log" | tail -n 1 | cut -c 1-60)"
        if [ -t 1 ] && [ -z "${CI:-}" ]; then
            printf '\r\033[K%s' "$line"
        elif ((SECONDS - said >= 15)); then
            echo "$line"
            said=$SECONDS
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM
    [ -t 1 ] && [ -z "${CI:-}" ] && printf '\r\033[K'
    if [ $status = 0 ]; then
        rm -f "$log"
        log=""
        say "$what: done in $((SECONDS - started)) s"
    else
        say "$what: FAILED after $((SECONDS - started)) s; the end of $log:"
        tail -n 15 "$log" >&2
    fi
    return $status
}

[[ $torch == newest || $torch == 2.7 ]] ||
    fail "TORCH=$torch: .setup has a lock for TORCH=2.7 (older drivers) and for TORCH=newest"

fitting_python='import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))'
python_headers='import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))'

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 \
        /usr/bin/python3.11 /usr/bin/python3.12 /usr/bin/python3.13; do
        "$candidate" -c "$fitting_python" 2>/dev/null && { echo "$candidate"; return; }
    done
    return 1
}

# apt WHAT PACKAGE…: install system packages where that is allowed: by an answer, by CI, or as root without
# a terminal, as in containers; false elsewhere.
apt() {
    local what=$1 privilege="" answer=""
    shift
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || return 1
        privilege="sudo -n"
    fi
    if [ -z "${CI:-}" ] && { [ -t 0 ] || [ -n "$privilege" ]; }; then
        [ -t 0 ] && read -r -p "setup: $what needs $*; install them by apt-get, as root? [y/N] " answer
        [[ $answer == [yY]* ]] || return 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    watch "apt-get update" $privilege apt-get update &&
        watch "apt-get install for $what ($*)" \
            $privilege apt-get install -y --no-install-recommends "$@"
}

make_venv() {
    local python
    mkdir -p .venv
    python=$(find_python) || { apt "Python" python3-venv python3-dev && python=$(find_python); } ||
        fail "pospre needs Python 3.11, 3.12 or 3.13 with its venv module (Debian, Ubuntu: apt-get install" \
            "python3.11-venv python3.11-dev); installed elsewhere: make setup PYTHON=/path/to/python3.11"
    watch "making .venv with $("$python" -V)" "$python" -m venv --clear .venv
}

ffcv_can_build() {
    pkg-config --exists opencv4 libturbojpeg 2>/dev/null && command -v c++ >/dev/null &&
        [ -f "$(.venv/bin/python -c "$python_headers")" ]
}

# What .venv must hold; written to the stamp once it does. FFCV: yes, no (what it needs is missing)
# or failed (it could not be built: not tried again until the lock changes).
wanted() { echo "$(.venv/bin/python -V) ffcv=$1 $(cksum <"$lock")"; }

# uv takes less than a third of pip's time; pip knows mirrors that only pip.conf names.
install() {
    local pip=(.venv/bin/python -m pip install --progress-bar off --no-deps $from_lock)
    local uv=(.venv/bin/uv pip install --python .venv/bin/python --no-deps --require-hashes
        --no-build-isolation --constraints .venv/requirements.txt)  # above pyproject's overrides
    only "setuptools|uv" "$lock" >.venv/first.txt
    watch "pip install of uv" "${pip[@]}" -r .venv/first.txt &&
        { watch "uv pip install of requirements.txt (3 GB at the first time)" \
            "${uv[@]}" -r .venv/requirements.txt ||
            watch "pip install of requirements.txt (3 GB at the first time, minutes)" \
                "${pip[@]}" -r .venv/requirements.txt; }
}

if ! { .venv/bin/python -c "$fitting_python" && .venv/bin/python -m pip -V >/dev/null; } 2>/dev/null; then
    make_venv
fi
echo "$torch" >"$choice"
if [ "$torch" = 2.7 ]; then
    with_floor "$lock" >.venv/torch2.7.lock
    lock=.venv/torch2.7.lock
fi
ffcv=no
declined=${FFCV:-}
[ "$declined" = no ] || { ffcv_can_build && ffcv=yes; }
if [ -f "$stamp" ]; then
    installed=$(cat "$stamp")
    if [ "$(wanted $ffcv)" = "$installed" ]; then
        [ $ffcv = yes ] || say "without .beton (FFCV needs: $system_packages)"
        exit 0
    elif [ $ffcv = yes ] && [ "$(wanted failed)" = "$installed" ]; then
        say "without .beton (FFCV could not be installed; to try again: rm $stamp)"
        exit 0
    fi
fi
rm -f "$stamp"
# what is no longer wanted goes first: files of CUDA 12 and 13 have the same names
if [ -f .venv/requirements.txt ]; then
    gone=$(LC_ALL=C comm -23 <(names .venv/requirements.txt) <(names "$lock") | xargs)
    # shellcheck disable=SC2086
    [ -z "$gone" ] || watch "pip uninstall of what is no longer needed" \
        .venv/bin/python -m pip uninstall --yes --quiet $gone
fi

if [ $ffcv = no ] && [ "$declined" != no ]; then
    apt FFCV $system_packages && ffcv_can_build && ffcv=yes
fi
if [ $ffcv = yes ]; then
    cp "$lock" .venv/requirements.txt
    if ! install; then  # one package that is compiled here shall not keep all else away
        mv "$log" "$ffcv_log"
        log=""
        ffcv=failed
    fi
fi
if [ $ffcv != yes ]; then
    say "without FFCV, so without .beton files; all else works. To have them: sudo apt-get install" \
        "$system_packages (macOS: brew install pkg-config opencv jpeg-turbo), and make setup again"
    without ffcv "$lock" >.venv/requirements.txt
    install ||
        fail "requirements.txt could not be installed; $log says why. Run make setup again once mended"
fi
wanted $ffcv >"$stamp"
[ $ffcv != failed ] || say "$ffcv_log says why FFCV failed; to try it again: rm $stamp; make setup"
say ".venv is ready ($(.venv/bin/python -V), $([ $ffcv = yes ] && echo with || echo without) FFCV)"
