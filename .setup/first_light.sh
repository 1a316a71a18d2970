#!/usr/bin/env bash
# From a folder of images to measured, exported encoders:
#     first_light.sh IMAGES FOLDER RECIPE… [key.sub=value …]
# converts IMAGES to both formats below FOLDER, a tenth held out; then pre-trains every RECIPE (with
# these keys), measures it on the held-out tenth, exports it and writes its report. Every command is printed, to be repeated
# by hand. Converted data and trained steps are not done again: if stopped, the same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly images=$1
name=$(basename "$images" | tr -c 'A-Za-z0-9._\n-' _)
[[ $name == [A-Za-z0-9]* ]] || name=images$name  # it begins the names of runs
readonly folder=$2/$name
readonly runs=${RUNS:-runs}
recipes=() overrides=()
for word in "${@:3}"; do
    case $word in
        run_name=* | data.path=* | trainer.run_folder=*)
            echo "error: ${word%%=*} is set by this command; choose the images with DATA=…, the folder" \
                "of runs with RUNS=…" >&2
            exit 2 ;;
        *=*) overrides+=("$word") ;;
        *) recipes+=("$word") ;;
    esac
done

run() {
    echo "+ python $*"
    .venv/bin/python "$@"
}

has_ffcv() { grep -q '^Python.* ffcv=yes' .venv/.installed; }

has_classes() {
    .venv/bin/python - "$folder/train/pospre.json" <<'PYTHON'
import json, sys
train = json.load(open(sys.argv[1]))
sys.exit(len(train["classes"] or range(train["samples"])) * 2 > train["samples"])
PYTHON
}

convert() {
    local split
    for split in train val; do
        run -m data_prep.convert "$images" "$folder/$split" --format mds --split $split
        if has_ffcv; then
            run -m data_prep.convert "$images" "$folder/$split.beton" --format ffcv --split $split
        fi
    done
}

measure() {
    if grep -q '^  droppos:' "$1/recipe.yaml"; then
        run -m pospre.evaluate position_grid --model "$1" --data "$folder/val"
        run -m pospre.evaluate position_pictures --model "$1" --data "$folder/val"
    fi
    if has_classes; then
        run -m pospre.evaluate logistic --model "$1" --data "$folder/val" bank="$folder/train"
        run -m pospre.evaluate knn --model "$1" --data "$folder/val" bank="$folder/train"
    else
        echo "+ logistic and kNN left out: they need class sub-folders with several images each"
    fi
}

# What the reports begin with, and where these are.
conclude() {
    .venv/bin/python - "$@" <<'PYTHON'
import sys
import textwrap
from pathlib import Path

from pospre.reporting.page import page_context
from pospre.reporting.run import read_run

for folder in map(Path, sys.argv[1:]):
    page = page_context(read_run(folder))
    print(f"\n{folder.name}\n" + textwrap.indent(textwrap.fill(page["verdict"], 96), "  "))
    for figure in page["headline"]:
        print(f"  {figure.label:20}{figure.value:>10}  {figure.note}")
    print(f"  encoder for timm    {folder / 'encoder.pth'}")
    print(f"  report              {(folder / 'report.html').resolve()}")
PYTHON
}

convert
train_data=$folder/train
if has_ffcv; then train_data=$folder/train.beton; fi
for recipe in "${recipes[@]}"; do
    run_name=${name}_$(basename "$recipe" .yaml)
    run -m pospre.train "$recipe" run_name="$run_name" data.path="$train_data" trainer.run_folder="$runs" \
        "${overrides[@]}"
    measure "$runs/$run_name"
    run -m pospre.export "$runs/$run_name" "$runs/$run_name/encoder.pth" --format timm --overwrite
    run -m pospre.report "$runs/$run_name"
    finished+=("$runs/$run_name")
done
conclude "${finished[@]}"
