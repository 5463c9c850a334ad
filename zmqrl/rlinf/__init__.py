"""Configurations of RLinf, made into ours."""

from zmqrl.rlinf.command import main

__all__ = ["main"]
