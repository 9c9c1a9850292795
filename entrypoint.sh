#!/usr/bin/env bash
# This file runs one train script: RUN_MODE names it, and the table below has its file, what it teaches, and
# behind the bar what to run next, with which its report ends (training/conclusion.py). Two commands call it:
#
#   docker-compose up    this container is one rank: RANK of WORLD_SIZE, and rank 0 is at MASTER_ADDR
#   make run             the command in TORCHRUN starts WORLD_SIZE ranks on this machine
#
# ARGS goes to the script. In a container LINK=100mbit and LINK_DELAY=2ms slow its link down before the start.
set -eu
cd "$(dirname "$0")"

lessons() {
    cat <<'TABLE'
comm                                   comm/tour.py                                    every collective: who holds what before and after, bytes sent, time predicted and measured
point_to_point                         comm/point_to_point.py                          send and receive, the ring that deadlocks and its cures, latency and bandwidth of a link
train                                  data_parallel/train_alone.py                    the problem: every rank trains alone, and the replicas drift apart | make run RUN_MODE=data_parallel_naive keeps the replicas equal.
data_parallel_naive                    data_parallel/train_naive.py                    one all-reduce for each parameter after the backward: the replicas stay equal | make compare MODES='naive overlap buckets' ARGS='--link 200mbit,1ms --steps 20' shows how much of it the backward can hide, with all three on one simulated slow link.
data_parallel_naive_grad_accumulation  data_parallel/train_naive_grad_accumulation.py  several microbatches in a step, and one all-reduce of the sum of their gradients | make run RUN_MODE=data_parallel_naive_grad_accumulation ARGS='--grad-acc-steps 4' sends as many bytes a step.
data_parallel_overlap                  data_parallel/train_overlap.py                  one asynchronous all-reduce for each parameter, hidden behind the backward | make compare MODES='overlap buckets' ARGS='--link 200mbit,1ms --steps 20' shows what fewer and larger messages gain, with both on one simulated slow link.
data_parallel_bucket_overlap           data_parallel/train_bucket_overlap.py           gradients in buckets: few large all-reduces, each as early as it can start | make run RUN_MODE=data_parallel_bucket_overlap ARGS='--link 200mbit,1ms --trace traces' draws the timelines of a slow link into traces/.
data_parallel_ddp                      data_parallel/train_ddp.py                      PyTorch's own DistributedDataParallel in the same loop | make run RUN_MODE=data_parallel_bucket_overlap is the same idea in one file.
zero1_textbook                         zero/train_zero1_textbook.py                    ZeRO 1 in three phases of a step: reduce-scatter, update of the rank's shard, all-gather | make run RUN_MODE=zero1 sends the gradients in buckets, while the backward computes.
zero1                                  zero/train_zero1.py                             ZeRO 1: each rank keeps its shard of the optimizer's state, and gradients travel in buckets | make run RUN_MODE=zero2 also divides the gradients.
zero2                                  zero/train_zero2.py                             ZeRO 2: each rank keeps its shard of the optimizer's state and of the gradients | make run RUN_MODE=zero3_textbook also divides the parameters.
zero3_textbook                         zero/train_zero3_textbook.py                   ZeRO 3 by hand: a block is gathered before its forward and its backward, and freed afterwards | make compare MODES='zero3_textbook zero3' ARGS='--link 200mbit,1ms --steps 20' shows what is gained where gathers and reduce-scatters hide behind computing.
zero3                                  zero/train_zero3.py                             ZeRO 3: each rank keeps its shard of state, gradients and parameters, and gathers a block to use it | make run RUN_MODE=fsdp is PyTorch's own.
fsdp                                   zero/train_fsdp.py                              PyTorch's own fully_shard (FSDP2) in the same loop | make run RUN_MODE=zero3 is the same idea in one file.
tensor_parallel                        tensor_parallel/train_tensor_parallel.py        every layer is cut among the ranks, which work on the same examples | make run RUN_MODE=sequence_parallel also divides what lies between the layers.
sequence_parallel                      tensor_parallel/train_sequence_parallel.py      tensor parallel, and norms, dropout and residuals are cut by tokens | make run RUN_MODE=tensor_parallel keeps more activations, and sends less: it gathers no inputs for the backward.
tensor_parallel_native                 tensor_parallel/train_dtensor.py                PyTorch's own parallelize_module (DTensor) in the same loop | make run RUN_MODE=tensor_parallel is the same idea with our own layers.
pipeline_model_parallel                pipeline_parallel/train_model_parallel.py       layers cut into stages on different ranks; one rank works at a time | make run RUN_MODE=pipeline_afab lets the ranks work at the same time.
pipeline_afab                          pipeline_parallel/train_afab.py                 GPipe: microbatches follow each other through the stages, all forward, then all backward | make run RUN_MODE=pipeline_1f1b_by_hand has the same bubble and keeps fewer activations.
pipeline_1f1b_by_hand                  pipeline_parallel/train_1f1b_by_hand.py         1F1B: one forward, one backward in turn; as fast as GPipe, and fewer activations | make run RUN_MODE=pipeline_1f1b runs the same order from a table.
pipeline_1f1b                          pipeline_parallel/train_1f1b.py                 1F1B from a table of actions, which one loop runs as it runs any schedule | make run RUN_MODE=pipeline_interleaved has a smaller bubble.
pipeline_interleaved                   pipeline_parallel/train_interleaved.py          interleaved 1F1B: several small stages on each rank, and a smaller bubble | make run RUN_MODE=pipeline_zero_bubble fills the bubble with weight gradients.
pipeline_zero_bubble                   pipeline_parallel/train_zero_bubble.py          zero bubble: the backward in two halves, and weight gradients fill the bubble | make compare MODES='pipeline_1f1b pipeline_zero_bubble' ARGS='--metronome 20ms --steps 5' shows the bubbles of both, with a clock in the place of computing.
pipeline_native                        pipeline_parallel/train_torch_pipelining.py     PyTorch's own torch.distributed.pipelining in the same loop | make run RUN_MODE=pipeline_1f1b is the same idea with our own executor.
context_ring                           context_parallel/train_ring_attention.py        a sequence is cut among the ranks, and keys and values travel round a ring while attention is computed | make run RUN_MODE=context_all_to_all sends the heads instead of keys and values.
context_all_to_all                     context_parallel/train_all_to_all_attention.py  a sequence is cut everywhere but in attention, where the heads are cut: an all-to-all on each side | make run RUN_MODE=context_ring works with more ranks than heads.
expert_parallel                        expert_parallel/train_moe.py                    a token passes only a few of many experts, and the experts lie on different ranks | make run RUN_MODE=expert_parallel ARGS='--balance bias' balances the experts without a loss.
local_sgd                              low_communication/train_local_sgd.py            each rank trains some steps alone, and then the ranks average their parameters | make run RUN_MODE=diloco_plain gives the ranks' mean change to an outer optimizer.
diloco_plain                           low_communication/train_diloco_plain.py         each rank trains some steps alone, and an outer optimizer takes a step with the mean change | make run RUN_MODE=diloco can send it in fragments, and in few bits, while the training goes on.
diloco                                 low_communication/train_diloco.py               streaming DiLoCo: the change in fragments, in few bits, while the training goes on | make run RUN_MODE=diloco ARGS='--fragments 4 --delay 2' sends a part at a time, while the training goes on.
diloco_elastic                         low_communication/train_elastic_diloco.py       DiLoCo with ranks that die and come back: each synchronisation takes the mean over those who are there | make run RUN_MODE=hybrid_elastic synchronises in each step, so the others have to repeat one.
data_parallel_compressed               low_communication/train_compressed.py           buckets of gradients that are compressed: fewer bits, fewer numbers, or thin matrices | make compare MODES='buckets data_parallel_compressed' ARGS='--link 200mbit --steps 20' compares it with gradients that are not compressed, on the same slow link.
hsdp                                   low_communication/train_hsdp.py                 shards within a machine, and a replica on each machine | make compare MODES='zero3 hsdp' ARGS='--link 200mbit,1ms --steps 20' shows what is gained where fewer bytes cross the slow link.
hybrid                                 hybrid_parallel/train_hybrid.py                 pipeline, data, context, tensor and expert parallelism at once, on one mesh of ranks | make run RUN_MODE=hybrid_elastic_mesh goes on when a rank of the mesh dies.
hybrid_elastic                         hybrid_parallel/elastic/train_elastic.py        a rank dies, and the others go on in the same processes with a smaller group | make run RUN_MODE=hybrid_elastic_mesh does this where a rank's state is in no other rank.
hybrid_elastic_mesh                    hybrid_parallel/elastic/train_elastic_mesh.py   a rank of a mesh dies, and the others go on, on another mesh, from the last checkpoint | make run RUN_MODE=hybrid trains on a mesh without deaths.
TABLE
}

LINK_TC=/usr/local/libexec/link-tc # a copy of tc that needs no root; only the image has it, see Dockerfile

main() {
    local script name
    [ -w "${TMPDIR:-/tmp}" ] || refuse "${TMPDIR:-/tmp} cannot be written, and Python needs a place for temporary files: mount one there (docker run --tmpfs /tmp), or name one in TMPDIR."
    if [ "${RUN_MODE:-}" = list ]; then
        is_told_by_node0 || list_modes
        exit 0
    fi
    script=$(script_of "${RUN_MODE:-}") || exit 2
    if [ -n "${WORLD_SIZE:-}" ] && ! [[ $WORLD_SIZE =~ ^[1-9][0-9]{0,3}$ ]]; then
        refuse "WORLD_SIZE is '$WORLD_SIZE'; it must be a number of ranks, 1 or more."
    fi
    check_link
    # If it is unset, torchrun warns, and each container's rank uses every core of the machine.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    set -f # a * in ARGS is passed on as it is, and not replaced by file names
    if [ -n "${TORCHRUN:-}" ]; then
        for name in RESTART COMPOSE_PROFILES MASTER_ADDR MASTER_PORT; do
            [ -z "${!name:-}" ] || say "make run does not use $name."
        done
        # shellcheck disable=SC2086 # TORCHRUN and ARGS are several words each
        exec $TORCHRUN --nproc-per-node="${WORLD_SIZE:-2}" "$script" "$@" ${ARGS:-}
    fi
    [[ ,${COMPOSE_PROFILES:-}, == *,more,* ]] && NODES=8
    if [ -n "${NODES:-}" ] && [ "${WORLD_SIZE:-1}" -gt "$NODES" ]; then
        refuse "WORLD_SIZE is $WORLD_SIZE, but docker-compose.yaml starts only $NODES nodes; choose fewer ranks, or start 8 nodes with COMPOSE_PROFILES=more."
    fi
    if [[ ${RANK:-} =~ ^[0-9]+$ ]] && [ "$RANK" -ge "${WORLD_SIZE:-1}" ]; then
        say "$HOSTNAME is not needed: its rank would be $RANK, and WORLD_SIZE is ${WORLD_SIZE:-1}."
        exit 0
    fi
    if [[ ,${COMPOSE_PROFILES:-}, == *,notebook,* && -n ${NODES:-} ]]; then
        if [ "${RANK:-0}" -gt 0 ] && [ "$RANK" -eq $((${WORLD_SIZE:-1} - 1)) ]; then
            say "$HOSTNAME is not needed: the notebook is rank $RANK, with this cell: %run ../$script${ARGS:+ $ARGS}"
            exit 0
        fi
        export JOIN_TIMEOUT="${JOIN_TIMEOUT:-600}" # a person has to open the notebook first
    fi
    shape_link
    # shellcheck disable=SC2086
    exec python "$script" "$@" ${ARGS:-}
}

script_of() {
    local mode script what near
    while read -r mode script what; do
        if [ "$mode" = "$1" ]; then
            echo "$script"
            return
        fi
    done < <(lessons)
    is_told_by_node0 && return 1
    near=$(nearest "$1")
    if [ -n "$near" ]; then
        say "There is no RUN_MODE '$1': did you mean $near? RUN_MODE=list shows all."
    else
        say "${1:+There is no RUN_MODE '$1'. }Choose a RUN_MODE:"
        list_modes >&2
    fi
    return 1
}

list_modes() {
    lessons | while read -r mode _ what; do printf '  RUN_MODE=%-37s %s\n' "$mode" "${what% | *}"; done
}

# The mode whose name is most like an unknown one, or the shortest that has it as a part, or nothing.
nearest() {
    local python=python
    [ -x .venv/bin/python ] && python=.venv/bin/python
    lessons | "$python" -c 'import difflib, sys
modes = [line.split()[0] for line in sys.stdin]
parts = sorted((mode for mode in modes if sys.argv[1] in mode.split("_")), key=len)
print(*(difflib.get_close_matches(sys.argv[1], modes) or parts)[:1])' "$1" 2>/dev/null || true
}

check_link() {
    shopt -s nocasematch
    if [ -n "${LINK:-}" ] && ! [[ $LINK =~ ^[0-9]+(\.[0-9]+)?[kmg]bit$ && $LINK =~ [1-9] ]]; then
        refuse "LINK is '$LINK'; it must be a rate such as 100mbit or 1gbit."
    fi
    if [ -n "${LINK_DELAY:-}" ] && ! [[ $LINK_DELAY =~ ^[0-9]+(\.[0-9]+)?(us|ms|s)$ ]]; then
        refuse "LINK_DELAY is '$LINK_DELAY'; it must be a time such as 2ms or 500us."
    fi
    shopt -u nocasematch
    if [ -n "${LINK:-}${LINK_DELAY:-}" ] && ! [ -x "$LINK_TC" ]; then
        say "LINK and LINK_DELAY are ignored here, because they shape the links of containers only; where a script has the option --link, use ARGS='--link ${LINK:-1gbit}${LINK_DELAY:+,$LINK_DELAY}'."
        LINK='' LINK_DELAY=''
    fi
}

# A token bucket filter (tbf) limits the rate at which this container sends, and netem, if LINK_DELAY is set,
# delays each packet before that. The bucket is large because of the network card's offloading: with 64kb,
# four ranks get half of the rate.
shape_link() {
    local interface parent=root error
    read -r _ interface _ < <(ip -o -4 address show scope global) || true
    if [ -n "${LINK_DELAY:-}" ]; then
        if error=$("$LINK_TC" qdisc add dev "$interface" root handle 1: netem delay "$LINK_DELAY" limit 100000 2>&1); then
            parent='parent 1:1'
        else
            say "LINK_DELAY=$LINK_DELAY is ignored: delay is not available in this kernel (${error##*: })."
        fi
    fi
    if [ -n "${LINK:-}" ]; then
        # shellcheck disable=SC2086 # the parent is two words
        error=$("$LINK_TC" qdisc add dev "$interface" $parent tbf rate "$LINK" burst 256kb latency 100ms 2>&1) ||
            { say "LINK=$LINK cannot be set on ${interface:-a network}: ${error##*: } (it needs cap_add: [NET_ADMIN])."; exit 2; }
    fi
}

say() { echo "$*" >&2; }

refuse() {
    is_told_by_node0 || say "$*"
    exit 2
}

# docker-compose.yaml gives all nodes the same settings, so only node0 says what is wrong with them.
is_told_by_node0() { [ -n "${NODES:-}" ] && [ "${RANK:-0}" != 0 ]; }

main "$@"
