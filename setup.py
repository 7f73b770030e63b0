"""Names the packages. The docs, job files, hostfiles and templates of the checkout are installed in ascendrun/data, and
the software bill of materials: what the command runs with, in the versions of locks/base.txt."""

import json
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DATA = ["ascendrun.data." + directory for directory in ("docs", "jobs", "hostfiles", "templates")]
SBOM = "ascendrun/data/sbom.cdx.json"
PIN = re.compile(r"^([\w.-]+)==([\w.+!-]+)(?: ; (.+?))? \\$", re.MULTILINE)


def component(name: str, version: str, marker: str) -> dict:
    purl = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{version}"
    properties = [{"name": "python:marker", "value": marker}] if marker else []
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "properties": properties,
    }


class BuildWithSbom(build_py):
    """The same source gives the same bytes: without a time and a serial number."""

    def run(self) -> None:
        super().run()
        lock = Path(__file__).with_name("locks") / "base.txt"
        parts = [component(*found.groups(default="")) for found in PIN.finditer(lock.read_text(encoding="utf-8"))]
        own = {**component("ascendrun", self.distribution.get_version(), ""), "type": "application"}
        needs = [{"ref": own["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}]
        bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": own}}
        target = Path(self.build_lib, SBOM)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**bill, "components": parts, "dependencies": needs}, indent=1), encoding="utf-8")


setup(packages=find_packages(include=["ascendrun", "ascendrun.*"]) + DATA, cmdclass={"build_py": BuildWithSbom})
