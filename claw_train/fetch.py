"""`claw fetch NAME ...`: brings models to this machine before anything needs them.

In: names of `conf/model`. Out: one line each with where the weights are and where they came from. Trains nothing.
"""

import argparse
import sys
from collections.abc import Sequence

from claw_train.errors import ConfigError, ModelError
from claw_train.models import find_model, model_config

EXIT_USAGE = 2
"""Something the user can mend."""


def main(argv: Sequence[str]) -> int:
    """Fetches, checks and converts models into the cache."""
    parser = argparse.ArgumentParser(prog="claw fetch", description="Brings models to this machine.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of conf/model, for example smollm2-135m")
    for name in parser.parse_args(argv).names:
        try:
            found = find_model(model_config(name))
        except (ConfigError, ModelError) as error:
            print(f"claw fetch: {error}", file=sys.stderr)
            return EXIT_USAGE
        print(f"{name}: {found.path} ({found.source})", flush=True)
    return 0
