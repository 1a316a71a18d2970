# Sourced: what the scripts here read in locks, which pip takes by --require-hashes.

# only NAMES LOCK, without NAMES LOCK: a lock's packages that the pattern NAMES fits, and the others.
only() {
    awk -v "names=^($1)==" '/^[^ #]/ { fits = $1 ~ names } fits' "$2"
}
without() {
    awk -v "names=^($1)==" '/^[^ #]/ { fits = $1 ~ names } !fits' "$2"
}

# What is built here is built by the lock's setuptools: pip would fetch another one, unchecked.
readonly from_lock="--require-hashes --use-pep517 --no-build-isolation"

# pins FILE: NAME==VERSION of every package in a requirements file, named as pip compares names.
pins() {
    awk -F '==' '/^[A-Za-z0-9]/ { sub(/\[.*/, "", $1); gsub(/[-_.]+/, "-", $1); sub(/[ ;\\].*/, "", $2)
        print tolower($1) "==" $2 }' "$1" | LC_ALL=C sort
}

names() { pins "$1" | sed 's/==.*//' | LC_ALL=C sort; }

# with_floor LOCK: a lock's packages, with the versions of the oldest torch that is tested.
readonly floor=.setup/torch2.7.lock of_torch="triton|nvidia-.*|cuda-.*"
with_floor() {
    without "$(names "$floor" | paste -sd '|')|$of_torch" "$1"
    cat "$floor"
}

# check_lock FILE LOCK: say which pins a lock lacks, if any.
check_lock() {
    local missing
    missing=$(LC_ALL=C comm -23 <(pins "$1") <(pins "$2") | xargs)
    [ -z "$missing" ] ||
        { echo "error: $2 lacks $missing; make it again as $1 says" >&2; exit 2; }
}
