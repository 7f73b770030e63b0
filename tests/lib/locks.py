"""Writes the locks with hashes, for all platforms in the versions of constraints.txt: python -m tests.lib.locks."""

import subprocess
import tempfile
import venv
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LOCKS = CHECKOUT / "locks"
UV = "uv==0.13.9"
PYTHON = "3.9.2"
"""The oldest Python that the newest cryptography supports."""
EXTRAS: dict[str, list[str]] = {"base": [], "train": ["--extra", "train"]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        subprocess.run([f"{folder}/bin/pip", "install", "--quiet", UV], check=True)
        for name, extras in EXTRAS.items():
            argv = [f"{folder}/bin/uv", "pip", "compile", "setup.cfg", "-c", "constraints.txt", *extras]
            argv += ["--universal", "--python-version", PYTHON, "--generate-hashes", "--no-annotate", "--no-header"]
            subprocess.run([*argv, "--quiet", "--output-file", LOCKS / f"{name}.txt"], check=True, cwd=CHECKOUT)


if __name__ == "__main__":
    main()
