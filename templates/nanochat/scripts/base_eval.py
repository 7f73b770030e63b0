"""Score the base model: bits per byte of the validation documents."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("base_eval")
