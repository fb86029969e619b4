"""``python -m flashbias_convert`` is ``flashbias-convert``."""

from .cli import main

if __name__ == "__main__":
    main()
