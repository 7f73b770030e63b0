"""Print the bytes of a token in several kinds of text."""

from ascendrun.programs.nanochat.guide import tok_eval

if __name__ == "__main__":
    tok_eval()
