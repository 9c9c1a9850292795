#!/usr/bin/env bash
# This script starts a hybrid training with as many processes as its configuration asks for:
#
#   scripts/launch_training.sh --config configs/config.yaml               all of them on this machine
#   scripts/launch_training.sh --config configs/config.yaml --steps 100   with one key changed
#
# On several machines, run it on each with the same configuration; only --node-rank differs.
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'USAGE'
usage: launch_training.sh --config FILE [machines] [--key value ...]

  --config FILE        the configuration, such as configs/config.yaml
  --key value          changes a key of the configuration; --help-keys lists all keys

on several machines, with the same number of processes on each:
  --nnodes N           number of machines
  --node-rank R        this machine's number, from 0 to N-1
  --master-addr ADDR   address of machine 0, which the others can reach
  --master-port PORT   a free port of machine 0 (29500)

  --max-restarts K     how often torchrun starts the processes again after one has died (0)

TORCHRUN=COMMAND is started in place of torchrun.
USAGE
}

main() {
    local config='' nnodes='' node_rank='' master_addr='' master_port=29500 max_restarts=0 name value
    local words=() python
    python=$(python_here) || exit 2
    while [ $# -gt 0 ]; do
        name=${1%%=*}
        case ${name//_/-} in
            -h | --help) usage; return 0 ;;
            --help-keys) "$python" -P -m hybrid_parallel.config --help; return ;;
            --config | --nnodes | --node-rank | --master-addr | --master-port | --max-restarts)
                if [ "$name" != "$1" ]; then
                    value=${1#*=}
                elif [ $# -gt 1 ] && [ "${2#--}" = "$2" ]; then
                    value=$2
                    shift
                else
                    value=''
                fi
                [ -n "$value" ] || refuse "$name has no value."
                name=${name#--} && name=${name//-/_}
                printf -v "$name" %s "$value"
                ;;
            *) words+=("$1") ;;
        esac
        shift
    done
    [ -n "$config" ] || { usage >&2; refuse "There is no --config FILE."; }
    words=(--config "$config" ${words[@]+"${words[@]}"})

    # This refuses what makes no sense before any process starts.
    local processes
    processes=$("$python" -P -m hybrid_parallel.config "${words[@]}") || exit
    is_number "$max_restarts" || refuse "--max-restarts is '$max_restarts'; it must be 0 or more."

    local options=(--max-restarts="$max_restarts" --nproc-per-node="$processes")
    if [ -n "$nnodes" ]; then
        check_machines
        # The static rendezvous gives a machine the ranks that --node-rank says, so a tensor group stays on one
        # machine. The c10d rendezvous numbers machines as they arrive, and unpickles what it reads from the network.
        options=(
            --max-restarts="$max_restarts" --nproc-per-node="$((processes / nnodes))"
            --nnodes="$nnodes" --node-rank="$node_rank"
            --rdzv-backend=static --rdzv-endpoint="$master_addr:$master_port" --rdzv-id=hybrid
        )
    elif [ -n "$node_rank$master_addr" ]; then
        refuse "--node-rank and --master-addr need --nnodes, the number of machines."
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # if it is unset, torchrun warns
    words=("${options[@]}" "$root/hybrid_parallel/train_hybrid.py" "${words[@]}")
    if [ -n "${TORCHRUN:-}" ]; then
        # shellcheck disable=SC2086 # TORCHRUN is several words
        exec $TORCHRUN "${words[@]}"
    fi
    exec "$python" -P -m lab.launch.torchrun "${words[@]}" # torchrun without its own traceback
}

check_machines() {
    is_number "$nnodes" && [ "$nnodes" -ge 1 ] || refuse "--nnodes is '$nnodes'; it must be the number of machines, 1 or more."
    [ -n "$node_rank" ] || refuse "--nnodes needs --node-rank, this machine's number from 0 to $((nnodes - 1))."
    is_number "$node_rank" && [ "$node_rank" -lt "$nnodes" ] ||
        refuse "--node-rank is '$node_rank'; it must be from 0 to $((nnodes - 1))."
    [ -n "$master_addr" ] || refuse "--nnodes needs --master-addr, the address of machine 0."
    is_number "$master_port" && [ "$master_port" -ge 1 ] && [ "$master_port" -le 65535 ] ||
        refuse "--master-port is '$master_port'; it must be from 1 to 65535."
    [ $((processes % nnodes)) -eq 0 ] ||
        refuse "num_gpus is $processes, which $nnodes machines cannot share equally; choose a multiple of $nnodes."
}

is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }

# The lessons are found from any folder (PYTHONPATH), and a folder there that has the name of one does no harm (-P).
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

python_here() {
    if [ -x "$root/.venv/bin/python" ]; then
        echo "$root/.venv/bin/python"
    else
        command -v python3 || command -v python || refuse "There is no Python here; run \`make setup\` in $root first."
    fi
}

refuse() {
    echo "$*" >&2
    exit 2
}

main "$@"
