"""Learn the tokens from data/text."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("tok_train")
