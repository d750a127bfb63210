"""Uniform sampling without replacement: the default, with a name.

What it does: every client is as likely as any other, none twice in a Work.
When it helps: always a fair start; it is what a method without a sampler uses.
What it costs: a draw costs what the cohort costs, however many clients there are.
"""

from fedloom.method import register
from fedloom.methods.defaults import Uniform

register("uniform")(Uniform)
