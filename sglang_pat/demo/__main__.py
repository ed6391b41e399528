"""`python -m sglang_pat.demo`."""

import sys

from sglang_pat.demo import main

if __name__ == "__main__":
    sys.exit(main())
