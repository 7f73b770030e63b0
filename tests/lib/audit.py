"""Asks the index for known vulnerabilities of what locks/ pins: python -m tests.lib.audit.

Without a network it is skipped, with the reason.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.lib.locks import EXTRAS, LOCKS

TOOL = "pip-audit==2.10.1"
LIMIT_S = 600.0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        found = Path(folder, "found.json")
        files = [word for name in EXTRAS for word in ("-r", str(LOCKS / f"{name}.txt"))]
        options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "-f", "json", "-o", str(found)]
        for argv in (["pip", "install", "--quiet", TOOL], ["pip_audit", *options, *files]):
            argv = [f"{folder}/bin/python", "-m", *argv]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode and not found.exists():
                print("skipped:", " ".join(argv[2:4]), "failed:", (done.stderr.strip().splitlines() or ["?"])[-1])
                return 0
        rows = json.loads(found.read_text())["dependencies"]
    bad = [f"{row['name']} {row['version']}: {one['id']}" for row in rows for one in row.get("vulns", ())]
    print("\n".join([f"{len(rows)} packages, {len(bad)} known vulnerabilities", *bad]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
