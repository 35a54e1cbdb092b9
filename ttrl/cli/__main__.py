"""`python -m ttrl.cli`: the `ttrl` command if its script is not on PATH."""

import sys

from ttrl.cli import main

sys.exit(main())
