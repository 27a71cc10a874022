"""`python -m pkmlm`, and `torchrun -m pkmlm`."""

from pkmlm.cli import main

if __name__ == "__main__":
    main()
