"""Numbers in text: `last_number` reads the last one exactly, or not at all. For graders; every
function takes linear time.
"""

from ttrl.tasks.numerals.number_reader import last_number
from ttrl.tasks.numerals.number_tokens import ascii_digits, by_replacement, has_digit, raised

__all__ = ["ascii_digits", "by_replacement", "has_digit", "last_number", "raised"]
