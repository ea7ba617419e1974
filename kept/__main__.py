"""``python -m kept`` is the console script ``kept``."""

from kept.cli import main

if __name__ == "__main__":
    main()
