"""Group-relative policy optimisation: no critic, the group of responses to one prompt is the baseline."""

from __future__ import annotations

from lightning_rlhf.modules.base import RLHFLightningModule


class GRPOLightningModule(RLHFLightningModule):
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and its family.

    ``advantage: grpo | dr_grpo | rloo``; the defaults are the base's: clipped loss, token-mean over the optimizer step (as in
    DAPO), no KL. Arguments: see `RLHFLightningModule`.
    """
