"""`python -m tutorial_engine.parallel --ranks 2`: the same requests on several processes."""

import sys

from tutorial_engine.parallel.ranks import main

if __name__ == "__main__":
    sys.exit(main())
