"""`python -m claw_train` is `claw-train`."""

import sys

from claw_train.cli import main

sys.exit(main())
