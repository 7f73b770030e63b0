"""Score a model on tasks: -i sft, -a NAME|NAME, -n samples, -x questions of each task."""

from ascendrun.programs.nanochat.guide import run

if __name__ == "__main__":
    run("chat_eval")
