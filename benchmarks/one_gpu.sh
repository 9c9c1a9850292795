#!/usr/bin/env bash
# What one GPU can show, in ten minutes at most: each block has a limit of its own, and ends in one line.
#
#   bash benchmarks/one_gpu.sh            all blocks; their output goes to runs/one_gpu/
#   bash benchmarks/one_gpu.sh pair       the blocks whose name begins so
#
# Two ranks that share a GPU get an NCCL_HOSTID each: nccl then takes them for those of two machines.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}
export OMP_NUM_THREADS=1 BACKEND=nccl
logs=runs/one_gpu only=${1:-} failed=0 port=29700
rm -rf "$logs"
mkdir -p "$logs"

block() { # name, seconds, command ...: run it with a limit, and say in a line how it went
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    [[ $name == "$only"* ]] || return 0
    timeout --kill-after=5 "$limit" bash -c '"$@"' - "$@" >"$logs/$name.log" 2>&1 || status=$?
    local verdict=ok
    if [ "$status" -eq 124 ]; then verdict="NOT ENDED in $limit s"; elif [ "$status" -ne 0 ]; then verdict=FAILED; fi
    [ "$verdict" = ok ] || failed=1
    printf '%-34s %-20s %4d s   %s\n' "$name" "$verdict" $((SECONDS - start)) "$(grep -aE ' s a step|ms, .*tokens/s|has died|rank [0-9]+: ' "$logs/$name.log" | tail -n 1 | tr -d '│' | xargs -0 2>/dev/null | head -c 90)"
}

ranks() { # number, script, options: as torchrun would start them, on one GPU
    local n=$1 rank status=0 pids=()
    shift
    for ((rank = 0; rank < n; rank++)); do
        RANK=$rank LOCAL_RANK=0 WORLD_SIZE=$n LOCAL_WORLD_SIZE=1 NCCL_HOSTID=$rank MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=$port $PY "$@" &
        pids+=($!)
    done
    [ -z "${KILLED:-}" ] || { sleep "$KILLED" && kill -9 "${pids[1]}"; }
    for rank in "${pids[@]}"; do wait "$rank" || status=$?; done
    return $status
}

survives() { # seconds, options of `ranks`: rank 1 is killed after so long, and rank 0 must say so
    local said
    said=$(KILLED=$1 ranks 2 "${@:2}" 2>&1)
    echo "$said"
    grep -q "rank 0: rank 1 has died" <<<"$said"
}
export -f ranks survives
export PY port

short=(--size tiny --batch-size 8)
alone=("$PY" -m torch.distributed.run --standalone --nproc-per-node=1)
folder=$logs/checkpoint
block train-and-save 60 "${alone[@]}" data_parallel/train_bucket_overlap.py --steps 3 "${short[@]}" --checkpoint "$folder"
block resume 60 "${alone[@]}" data_parallel/train_bucket_overlap.py --steps 6 "${short[@]}" --checkpoint "$folder" --resume
while read -r mode script _; do
    options=(--steps 2 "${short[@]}")
    case $mode in
    *elastic* | hybrid* | point_to_point) continue ;; # they need several ranks
    comm) options=(--mb 1 --repeats 1) ;;
    train) options=(--steps 2) ;;
    diloco_plain) options+=(--sync-every 2) ;;
    esac
    block "mode-$mode" 60 "${alone[@]}" "$script" "${options[@]}"
done < <(sed -n '/^lessons() {/,/^}/p' entrypoint.sh | grep -E '^[a-z0-9_]+ +[a-z_]+/[a-z0-9_/]+\.py')

block pair-1f1b 60 ranks 2 pipeline_parallel/train_1f1b.py --steps 3 "${short[@]}"
block pair-interleaved 60 ranks 2 pipeline_parallel/train_interleaved.py --steps 3 "${short[@]}"
block pair-zb_v 60 ranks 2 pipeline_parallel/train_zero_bubble.py --steps 3 "${short[@]}" --schedule zb_v
block pair-ring-attention 60 ranks 2 context_parallel/train_ring_attention.py --steps 3 "${short[@]}"
block pair-zero3 60 ranks 2 zero/train_zero3.py --steps 3 "${short[@]}"
block pair-int8 60 ranks 2 low_communication/train_compressed.py --steps 3 "${short[@]}" --compress int8
block pair-diloco 60 ranks 2 low_communication/train_diloco.py --steps 6 "${short[@]}" --sync-every 4 --fragments 2 --delay 2
block pair-experts 60 ranks 2 expert_parallel/train_moe.py --steps 3 "${short[@]}"
block four-mesh 90 ranks 4 hybrid_parallel/train_hybrid.py --steps 3 "${short[@]}" --tensor 2
block four-hsdp 90 ranks 4 low_communication/train_hsdp.py --steps 3 "${short[@]}" --shard-size 2
block killed-rank 60 survives 20 data_parallel/train_bucket_overlap.py --steps 100000 "${short[@]}"
block gradients-of-one-process 240 "$PY" -m tests.fake_gpu -q -k 'test_techniques and (data_parallel or zero or ahead)'
block pair-spans 60 ranks 2 benchmarks/gpu_spans.py
block sanitizer 90 env TORCH_CUDA_SANITIZER=1 "${alone[@]}" data_parallel/train_bucket_overlap.py --steps 2 "${short[@]}"
block mfu 90 "${alone[@]}" zero/train_zero3.py --steps 20 --size 13m --batch-size 64 --bf16
block with-pytorch 120 "${alone[@]}" benchmarks/gpus.py --quick --bf16
exit $failed
