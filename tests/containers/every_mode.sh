#!/usr/bin/env bash
# Runs in each container, in the place of entrypoint.sh: the lessons in MODES one after the other, each line a
# RUN_MODE and its options. Each has a port of its own, for the first ranks may begin while the last still leave.
cd /workbook || exit 1
failed=0 port=$MASTER_PORT
while read -r mode options; do
    port=$((port + 1))
    RUN_MODE=$mode ARGS=$options MASTER_PORT=$port bash entrypoint.sh </dev/null || { echo "$mode ended with $?" >&2 && failed=1; }
done <<<"$MODES"
exit $failed
