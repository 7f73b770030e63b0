"""A simulated node in a folder, and its tools run as the programs that they are."""

import os
import subprocess

from ascendrun.sim.ascend.tree import environ_of, install_tree


class SimNode:
    def __init__(self, root):
        self.root = root

    def install(self, scenario, **options):
        install_tree(self.root, scenario, seen_as=str(self.root), **options)
        return self

    def environ(self):
        return environ_of(self.root, dict(os.environ))

    def run(self, *argv, **options):
        """The finished process, with text output and a deadline."""
        options.setdefault("timeout", 60)
        return subprocess.run(argv, env=self.environ(), capture_output=True, text=True, **options)

    def popen(self, *argv, **options):
        return subprocess.Popen(argv, env={**self.environ(), **options.pop("more", {})}, **options)
