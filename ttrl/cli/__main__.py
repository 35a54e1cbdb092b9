"""`python -m ttrl.cli`: the `ttrl` command where the script of that name is not on PATH."""

import sys

from ttrl.cli import main

sys.exit(main())
