"""What the server that several test files share loads in place of ttrl's own extension of vLLM's
worker.
"""

from support.faulty_worker import FaultyWeightSync
from support.sharing_worker import Sharing


class Tried(FaultyWeightSync, Sharing):
    """Lets weights go wrong, and tells what is shared."""
