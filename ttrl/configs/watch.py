"""What a recipe watches while it trains: settings that change nothing about the result of a step."""

from dataclasses import dataclass

from ttrl.configs.base import Config, at_least


@dataclass(kw_only=True)
class WatchConfig(Config):
    """A part of both recipes' configs."""

    max_skipped_steps: int = 2
    """Optimizer steps in a row that may be skipped because their loss or gradient is NaN or infinite; one more stops the run."""
    measure_peak: bool = True
    """Measures once in a process, for a twentieth of a second, how fast the machine computes the model's largest matrix product;
    train.jsonl then says what share of that a step reached."""
    profile_steps: int = 0
    """Writes a trace of the first so many optimizer steps to output_dir/profile/."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        return found + at_least(0, max_skipped_steps=self.max_skipped_steps, profile_steps=self.profile_steps)
