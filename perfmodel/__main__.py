"""`python -m perfmodel` is the command `perfmodel`."""

import sys

from perfmodel.cli import main

sys.exit(main())
