#!/usr/bin/env bash
# Does MP3 pre-training help keyword spotting? From a folder (or a .tar, .tar.gz …) of WAV files:
#     speech.sh DATA FOLDER
# stores the clips' MFCCs below FOLDER, pre-trains with MP3, trains a classifier from scratch and from
# MP3's encoder, the same steps each and once for each of SEEDS, and measures them on the held-out
# clips. As many runs at once as there are cores, one thread each. If stopped, the same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly data=$1 runs=${RUNS:-runs} seeds=${SEEDS:-0 1 2}
readonly recipes=${RECIPES:-yamls/speech/demo}  # yamls/speech/paper: the published durations
name=$(basename "$data" | sed 's/\.tar.*$//; s/\.tgz$//' | tr -c 'A-Za-z0-9._\n-' _)
[[ $name == [A-Za-z0-9]* ]] || name=clips$name  # it begins the names of runs
readonly folder=$2/$name mp3=${name}_mp3
mkdir -p "$folder" "$runs"

run() {
    echo "+ python $*"
    .venv/bin/python "$@"
}

convert() {
    local source=$data split
    if [ -f "$data" ]; then
        source=$folder/wavs
        if [ ! -d "$source" ]; then
            rm -rf "$source.partial-tar" && mkdir "$source.partial-tar"
            tar -xf "$data" -C "$source.partial-tar" ||
                { echo "error: $data is no tar file that can be unpacked" >&2; exit 2; }
            mv "$source.partial-tar" "$source"
        fi
    fi
    for split in train val; do
        run -m data_prep.convert "$source" "$folder/$split" --format mds --split $split
    done
}

# train RECIPE RUN SEED [mp3]: one run, from MP3's encoder if so said, with its output in a file
train() {
    local log=$runs/$2.log
    local keys=(run_name="$2" seed="$3" data.path="$folder/train" trainer.run_folder="$runs")
    if [ "${4:-}" = mp3 ]; then keys+=(encoder.weights="$runs/$mp3"); fi
    echo "+ python -m pospre.train ${recipes}_$1.yaml ${keys[*]}"
    OMP_NUM_THREADS=1 .venv/bin/python -m pospre.train "${recipes}_$1.yaml" "${keys[@]}" \
        data.num_workers=1 trainer.progress_bar=false >"$log" 2>&1 ||
        { tail -n 5 "$log" >&2; return 255; }  # 255: xargs starts no more
    rm "$log"
}
export -f train
export recipes runs folder mp3

# The runs on standard input, one a line, as many at once as there are cores.
train_all() {
    local cores
    cores=$(.venv/bin/python -c 'from pospre.data.threads import *; print(available_cores())')
    xargs -P "$cores" -L 1 bash -c 'set -euo pipefail; train "$@"' train
}

convert
started=$SECONDS
{
    echo mp3 "$mp3" 0
    for seed in $seeds; do echo supervised "${name}_scratch_s$seed" "$seed"; done
} | train_all
for seed in $seeds; do
    echo supervised "${name}_from_mp3_s$seed" "$seed" mp3
done | train_all
echo "training took $((SECONDS - started)) s"

run -m pospre.evaluate patch_position --model "$runs/$mp3" --data "$folder/val" mask_ratios=0
for start in scratch from_mp3; do
    for seed in $seeds; do
        run -m pospre.evaluate accuracy --model "$runs/${name}_${start}_s$seed" --data "$folder/val"
    done
done

.venv/bin/python - "$runs" "$name" $seeds <<'PYTHON'
import json, statistics, sys
from pathlib import Path

runs, name, *seeds = Path(sys.argv[1]), *sys.argv[2:]


def results(run, evaluation):
    return json.loads((runs / run / "evaluation" / f"{evaluation}.json").read_text())["results"]


position = results(f"{name}_mp3", "patch_position")
summary = {
    "position_top1": position["ratios"][0]["top1"],
    "position_top5": position["ratios"][0]["top5"],
    "position_chance": [position["chance"], position["chance_top5"]],
}
print(f"\nposition of frames: top-1 {summary['position_top1']:.1%}, top-5 {summary['position_top5']:.1%}"
      f" (chance {position['chance']:.1%}, {position['chance_top5']:.1%})")
for start in ("scratch", "from_mp3"):
    tops = [100 * results(f"{name}_{start}_s{seed}", "accuracy")["top1"] for seed in seeds]
    mean, sd = statistics.mean(tops), statistics.stdev(tops) if len(tops) > 1 else 0.0
    summary[start] = {"top1": tops, "mean": mean, "sd": sd}
    print(f"top-1 {start:9} {mean:6.2f} ± {sd:.2f} %  ({', '.join(f'{top:.2f}' for top in tops)})")
path = runs / f"{name}_speech.json"
path.write_text(json.dumps(summary, indent=2) + "\n")
print(f"written to {path}")
PYTHON
