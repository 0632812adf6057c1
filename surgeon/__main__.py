"""`python -m surgeon`, and the command `surgeon`."""

import sys

from surgeon.common.processes import leave_out_working_folder


def main() -> None:
    """Run the command line, of which nothing in the working directory is a part."""
    leave_out_working_folder()

    # Before the rest is imported: it may not be ours.
    from surgeon.common.installation import clash

    if line := clash():
        sys.stderr.write(f"surgeon: {line}\n")
        sys.exit(2)

    from surgeon.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
