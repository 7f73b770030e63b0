"""Names the packages. The docs, job files, hostfiles and templates of the checkout are installed in ascendrun/data."""

from setuptools import find_packages, setup

DATA = ["ascendrun.data." + directory for directory in ("docs", "jobs", "hostfiles", "templates")]

setup(packages=find_packages(include=["ascendrun", "ascendrun.*"]) + DATA)
