"""``python -m paper``, from the root of a clone."""

from paper.commands import main

if __name__ == "__main__":
    main()
