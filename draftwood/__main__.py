"""`python -m draftwood` is `draftwood`."""

from draftwood.cli import main

if __name__ == "__main__":
    main()
