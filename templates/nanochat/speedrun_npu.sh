#!/usr/bin/env bash
# All stages on the devices of this machine: bash speedrun_npu.sh
# NPROC_PER_NODE  ranks (8)
# SKIP_RL=1       without the last training
# Sizes for another machine: NANOCHAT_ARGS="--depth=4 --device_batch_size=4". On several machines: ascendrun submit.
set -eu
cd -- "$(dirname -- "$0")"
. ./setup_ascend.sh

ranks=${NPROC_PER_NODE:-8}
results=${NANOCHAT_BASE_DIR:-out}
stage() { # SCRIPT OPTION…
    script=$1
    shift
    torchrun --standalone --nproc_per_node="$ranks" -m "scripts.$script" -- "$@"
}

python check_npu.py --device="${NANOCHAT_DEVICE:-npu}"
python -m scripts.tok_train
python -m scripts.tok_eval
stage base_train --depth=12 --device_batch_size=16 --total_batch_size=262144
stage base_eval
stage mid_train --device_batch_size=16 --total_batch_size=262144
# 8 ranks with 8 sequences each cannot share the 32 of the guide: a step has at least 64.
stage chat_sft --device_batch_size=8 --target_examples_per_step=$((8 * ranks))
stage chat_eval -i sft
trained="$results/base,$results/eval-base,$results/mid,$results/sft,$results/eval-sft"
if [ -z "${SKIP_RL:-}" ]; then
    stage chat_rl --device_batch_size=4 --examples_per_step=$((2 * ranks))
    stage chat_eval -i rl
    trained="$trained,$results/rl,$results/eval-rl"
fi
python -m ascendrun.programs.nanochat --mode=report --report_dirs="$trained" --output_dir="$results/report"
echo "report: $results/report/report.md"
