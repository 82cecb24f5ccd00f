"""``python -m titanyaml``."""

from titanyaml.cli import main

if __name__ == "__main__":
    main()
