"""Train the base model on data/text."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("base_train")
