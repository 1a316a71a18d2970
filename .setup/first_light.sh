#!/usr/bin/env bash
# From a folder of images to measured, exported encoders:
#   first_light.sh IMAGES FOLDER RECIPE…
# converts IMAGES to both formats in FOLDER (a tenth held out), then pre-trains every RECIPE, measures
# it on the held-out part, exports it and writes its report. Every command is printed, so that each
# can be repeated by hand; what is done already is not done again, so a stopped run goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly images=$1 folder=$2
shift 2
readonly recipes=("$@") runs=${RUNS:-runs}

run() {
    echo "+ python $*"
    .venv/bin/python "$@"
}

has_ffcv() { grep -q 'ffcv=yes' .venv/.installed; }

convert() {
    local part
    for part in train val; do
        run -m data_prep.convert "$images" "$folder/$part" --format mds --split $part
        if has_ffcv; then
            run -m data_prep.convert "$images" "$folder/$part.beton" --format ffcv --split $part
        fi
    done
}

measure() {
    local checkpoint=$1 run_path=$2
    if [[ $run_path == *droppos* ]]; then
        run -m pospre.evaluate position_grid --checkpoint "$checkpoint" --data "$folder/val"
        run -m pospre.evaluate position_pictures --checkpoint "$checkpoint" --data "$folder/val"
    fi
    run -m pospre.evaluate knn --checkpoint "$checkpoint" --data "$folder/val" bank="$folder/train"
}

convert
for recipe in "${recipes[@]}"; do
    name=$(basename "$folder")_$(basename "$recipe" .yaml)
    train_data=$folder/train
    has_ffcv && train_data=$folder/train.beton
    run -m pospre.train "$recipe" run_name="$name" data.path="$train_data" trainer.run_folder="$runs"
    measure "$runs/$name" "$runs/$name"
    run -m pospre.export "$runs/$name" "$runs/$name/encoder.pth" --format timm
    run -m pospre.report "$runs/$name"
done
