"""What all tests of counts and estimates share."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def always_one_thread(one_thread):
    """All of their models are tiny."""
