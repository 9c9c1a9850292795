#!/usr/bin/env bash
# Draws the pictures of this folder's README: each schedule on four ranks, measured above simulated.
set -eu
cd "$(dirname "$0")/.."
traces=$(mktemp -d)
trap 'rm -rf "$traces"' EXIT

draw() {
    local picture=$1 mode=$2
    shift 2
    make run RUN_MODE="$mode" WORLD_SIZE=4 ARGS="--metronome 20ms --steps 9 --trace $traces $*"
    .venv/bin/python pipeline_parallel/analysis/compare.py "$traces"
    mv "$traces/compared.png" "pipeline_parallel/$picture.png"
}

draw naive pipeline_model_parallel
draw gpipe pipeline_afab
draw 1f1b pipeline_1f1b
draw interleaved pipeline_interleaved
draw zb_h1 pipeline_zero_bubble
draw zb_v pipeline_zero_bubble --schedule zb_v
draw dualpipe_v pipeline_zero_bubble --schedule dualpipe_v
