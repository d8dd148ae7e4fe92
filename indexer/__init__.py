"""Lightning indexer: which compressed blocks a query attends to, and the loss that trains it. Importing registers the ops and touches no
device."""

from indexer.kl_loss.api import indexer_kl_loss
from indexer.kl_loss.op import KL_OPS, save_kl_policy
from indexer.lightning.api import lightning_indexer

__all__ = ["KL_OPS", "indexer_kl_loss", "lightning_indexer", "save_kl_policy"]
