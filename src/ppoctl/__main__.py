"""`python -m ppoctl`."""

from ppoctl.cli.app import main

if __name__ == "__main__":
    main()
