"""``python -m onehop.cli``: the command where its script is not on the path. Must never do more."""

import sys

from onehop.cli import main

if __name__ == "__main__":
    sys.exit(main())
