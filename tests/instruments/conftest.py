"""What all tests of instruments share."""

import pytest
from support.studied_run import two_iterations


@pytest.fixture(autouse=True, scope="session")
def always_one_thread(one_thread):
    """All of their models are tiny."""


@pytest.fixture(scope="session")
def run(model_folder, tmp_path_factory):
    """The checkpoint of a second iteration, of one step."""
    return two_iterations(tmp_path_factory.mktemp("run"), model_folder())
