"""``python -m bilevel.cli``: the command line."""

from bilevel.cli import main

if __name__ == "__main__":
    main()
