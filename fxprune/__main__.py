"""``python -m fxprune`` is the command ``fxprune``."""

from .cli import main

if __name__ == "__main__":
    main()
