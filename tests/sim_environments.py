"""Which python runs a simulator, of which some have virtual environments of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN_ENVIRONMENTS = ("envpool", "maniskill")
"""Simulators that `bin/setup NAME` makes a virtual environment for."""

_VULKAN = "import sapien; sapien.render.get_device_summary()"


def environment_of(name: str) -> Path:
    """The folder of the python that has this simulator.

    Raises:
        LookupError: It cannot run here; says why.
    """
    if name not in OWN_ENVIRONMENTS:
        return Path(sys.executable).parent
    binaries = ROOT / f".venv-{name}" / "bin"
    if not (binaries.parent / "installed").exists():
        raise LookupError(f"bin/setup {name} has not run, which bin/test --sims does")
    if name == "maniskill":
        probe = subprocess.run([binaries / "python", "-W", "ignore", "-c", _VULKAN], capture_output=True)
        if probe.returncode:
            raise LookupError(f"no Vulkan device ({probe.stderr.decode().splitlines()[-1]})")
    return binaries
