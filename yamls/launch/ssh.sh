#!/bin/bash
# Plain ssh: the same command on every host, the first of which is the master.
#
#   HOSTS="node0 node1" RANKS=8 DIR=/shared/pospre yamls/launch/ssh.sh RECIPE [key=value …]
#
# HOSTS are names that ssh can log in to without a password, and that the nodes can reach. RANKS is the
# number of processes (GPUs) per host. DIR is the folder on each host with .venv and the recipe.
# Ctrl-C or SIGTERM stops all hosts: they finish the step, save and exit with code 75. So do hosts that
# outlive a lost node. Run the same command again to resume. After 69 (a node or a bucket did not
# answer) it may work later. To repeat it automatically (without trainer.overwrite=true, which would
# delete the run each time):
#
#   until HOSTS=… yamls/launch/ssh.sh …; case $? in 69 | 75) false ;; esac; do sleep 10; done
set -u
: "${HOSTS:?the nodes, the master first}" "${RANKS:=1}" "${DIR:=$PWD}" "${MASTER_PORT:=29400}"
read -ra hosts <<<"$HOSTS"

# A node trains until its input ends, so it stops whenever this script ends.
# Signal the ranks and not their launcher, which would give them only 30 s.
on_a_node='
    cd "$1" && shift || exit 2
    .venv/bin/composer "$@" </dev/null &
    launcher=$!
    { cat >/dev/null; pkill -TERM -P "$launcher"; } <&0 &
    watcher=$!
    wait "$launcher"
    code=$?
    pkill -P "$watcher"
    exit "$code"'

folder=$(mktemp -d)
mkfifo "$folder/input"
exec 9<>"$folder/input"
rm -r "$folder"
trap 'exec 9>&-' INT TERM

nodes=()
for node_rank in "${!hosts[@]}"; do
    command=(bash -c "$on_a_node" node "$DIR" -n "$RANKS" --world_size $((RANKS * ${#hosts[@]}))
        --node_rank "$node_rank" --master_addr "${hosts[0]}" --master_port "$MASTER_PORT"
        -m pospre.train "$@")
    ssh "${hosts[node_rank]}" "$(printf '%q ' "${command[@]}")" </dev/fd/9 9>&- &
    nodes+=($!)
done

code=0
for node in "${nodes[@]}"; do
    wait "$node"
    status=$?
    if [ "$status" -gt 128 ]; then # perhaps a signal to this script: wait once more
        wait "$node"
        status=$?
    fi
    if [ "$code" -eq 0 ] || [ "$status" -eq 75 ]; then code=$status; fi
done
exit "$code"
