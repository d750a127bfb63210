"""Uniform sampling without replacement: the default, with a name."""

from fedloom.method import register
from fedloom.methods.defaults import Uniform

register("uniform")(Uniform)
