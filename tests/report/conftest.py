"""The scripts under benchmarks/ are imported by name, as they import each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
