"""Where things lie in a checkout, for tests that read, run or list them."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
SOURCE, DOCS, EXAMPLES, RESULTS = (ROOT / name for name in ("src", "docs", "examples", "results"))
