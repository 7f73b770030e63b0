"""Measure tokens/s of prompts and replies by batch size; the last line is JSON: -i sft, --batch-sizes 1,8,32."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("infer_bench")
