"""Train the model of mid_train on conversations and tasks."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("chat_sft")
