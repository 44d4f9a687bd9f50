"""Make ``scripts`` importable: it is no installed package, and pytest may not be run by ``-m``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
