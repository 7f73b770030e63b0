"""Names the packages: setup.cfg can find them or list them, but not both; the rest stands there."""

from setuptools import find_packages, setup

SKELETONS = ["ascendrun.skeletons." + folder for folder in ("jobs", "hostfiles", "templates")]

setup(packages=find_packages(include=["ascendrun", "ascendrun.*"]) + SKELETONS)
