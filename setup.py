"""The packages: conf/ lives at the top of the repository and inside the package of a wheel. setup.cfg has the rest."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lightning_egeria", "lightning_egeria.*"]), "lightning_egeria.conf"])
