"""The command line `claw`: what concerns environments and the machine.

    claw doctor [--json]     what this machine can run, and the fix for what it cannot
    claw reap                clears away sandboxes whose owner is gone

Other packages add commands through the entry point group `claw.commands`: the name is the command, the object a
function that takes the remaining arguments and returns the exit code; its docstring's first line is the help.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import metadata

from claw_envs.errors import ClawEnvError

EXIT_LEFT = 1
"""Something could not be removed."""
EXIT_USAGE = 2
"""Something the user can mend."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    plugged = {point.name: point for point in metadata.entry_points(group="claw.commands")}
    if args and args[0] in plugged:
        try:
            return plugged[args[0]].load()(args[1:])
        except ImportError as error:
            print(f"claw {args[0]}: {error}: pip install 'claw-rl[train]'", file=sys.stderr)
            return EXIT_USAGE
    options = _parser(sorted(plugged)).parse_args(args)
    try:
        return options.run(options)
    except ClawEnvError as error:
        print(f"claw {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser(plugged: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="claw",
        description="Environments for language-model agents, and the machine they run on.",
        epilog=f"further commands: {', '.join(plugged)}" if plugged else None,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="what this machine can run, and the fix for what it cannot")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)
    reap = commands.add_parser("reap", help="clears away sandboxes whose owner is gone")
    reap.set_defaults(run=_reap)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from claw_envs.doctor import examine

    sections = examine()
    if options.json:
        print(json.dumps({s.title: [dataclasses.asdict(c) for c in s.checks] for s in sections}, indent=2))
        return 0
    rows = [check for section in sections for check in section.checks]
    width = max(len(row.name) for row in rows)
    for section in sections:
        print(section.title)
        for row in section.checks:
            print(f"  {row.name:<{width}}  {row.status:<7}  {row.detail}")
            if row.fix:
                print(f"  {'':<{width}}  {'':<7}  -> {row.fix}")
    return 0


def _reap(options: argparse.Namespace) -> int:
    from claw_envs.sandbox.reaper import reap

    removed = reap()
    print(f"removed {len(removed.sandboxes)} sandboxes, {removed.processes} processes")
    if removed.failed:
        print(f"claw reap: something is left of {', '.join(removed.failed)}: run it again, as root", file=sys.stderr)
        return EXIT_LEFT
    return 0


if __name__ == "__main__":
    sys.exit(main())
