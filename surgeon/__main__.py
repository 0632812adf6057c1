"""`python -m surgeon`, and the command `surgeon`."""

from surgeon.common.processes import leave_out_working_folder


def main() -> None:
    """Run the command line, of which nothing in the working directory is a part."""
    leave_out_working_folder()

    from surgeon.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
