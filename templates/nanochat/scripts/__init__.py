"""The scripts of guide 002, on ascendrun's program nanochat: options and directories are in docs/nanochat.md."""

import importlib.util
import sys

if importlib.util.find_spec("ascendrun") is None:
    sys.exit(
        f"error: {sys.executable}: ascendrun is not installed\n"
        "hint: run `pip install -e CHECKOUT`, or `export PYTHONPATH=CHECKOUT`, with the checkout of ascendrun"
    )
