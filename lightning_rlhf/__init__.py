"""RLHF and RLVR for Hugging Face language models as plain PyTorch Lightning.

The names here are the ones to use in YAML (``class_path: lightning_rlhf.GRPOLightningModule``) and in code.
"""
