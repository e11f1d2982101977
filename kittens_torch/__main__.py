"""`python -m kittens_torch` prints what a bug report should hold."""

from .environment import report

print(report())
