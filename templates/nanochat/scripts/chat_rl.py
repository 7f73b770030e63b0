"""Train the model of chat_sft by rewards of its own replies."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("chat_rl")
