"""`python -m kittens_torch` prints what a bug report should hold; with `doctor` it also tests this installation."""

import argparse

from . import doctor
from .environment import report

parser = argparse.ArgumentParser(
    prog="python -m kittens_torch", description="What was built and which machines run here, for bug reports."
)
parser.add_argument("command", nargs="?", choices=["doctor"], help="also run a self-test of less than a minute")
if parser.parse_args().command == "doctor":
    raise SystemExit(min(doctor.main(), 1))
print(report())
