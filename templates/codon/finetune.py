"""Guide 004's finetune.py: `python finetune.py --help`. Options are in docs/codon.md."""

import importlib.util
import sys

if importlib.util.find_spec("ascendrun") is None:
    sys.exit(
        f"error: {sys.executable}: ascendrun is not installed\n"
        "hint: run `pip install -e CHECKOUT`, or `export PYTHONPATH=CHECKOUT`, with the checkout of ascendrun"
    )

if __name__ == "__main__":
    from ascendrun.programs.codon.guide import main

    main()
