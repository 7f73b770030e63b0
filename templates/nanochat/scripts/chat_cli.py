"""Chat with a model: -i sft, -p MESSAGE, -t temperature, -k top_k."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("chat_cli")
