"""RLHF and RLVR for Hugging Face language models as plain PyTorch Lightning."""
