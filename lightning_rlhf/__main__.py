"""``python -m lightning_rlhf`` is ``lightning-rlhf``."""

from lightning_rlhf.cli import main

if __name__ == "__main__":
    main()
