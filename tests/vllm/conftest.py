"""Run on its own, this folder still finds the helpers of the folder above."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
