"""Define all settings: of a run (`run`), of the recipes (`recipe`, `objective`), of the data
(`data`).

Nothing here loads torch, so the loop can check a recipe's YAML file before anything expensive
starts.
"""

from ttrl.configs.base import Config
from ttrl.configs.recipe import GRPOConfig, SFTConfig, TrainingConfig

__all__ = ["Config", "GRPOConfig", "SFTConfig", "TrainingConfig"]
