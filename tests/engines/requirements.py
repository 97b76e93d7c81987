"""Prints what a wheel asks for, one line each, except torch and its kin, which are installed from our constraints: requirements.py WHEEL"""

import sys
import zipfile

from packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
for line in lines:
    if line.startswith("Requires-Dist:"):
        asked = Requirement(line.split(":", 1)[1].strip())
        wanted = asked.marker is None or ("extra" not in str(asked.marker) and asked.marker.evaluate())
        if wanted and not asked.name.startswith("torch"):
            asked.marker = None
            print(asked)
