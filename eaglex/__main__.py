"""`python -m eaglex`: the command line without an installed script."""

import sys

from eaglex.cli import main

sys.exit(main())
