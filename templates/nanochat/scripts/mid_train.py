"""Train the base model on conversations, choices, sums and spelling."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("mid_train")
