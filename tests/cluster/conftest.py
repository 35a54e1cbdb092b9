"""One Ray cluster for the tests that need a real one: it takes longer to start than what most of
them do there.
"""

import importlib.util
from collections.abc import Iterator

import pytest
from support.ray_cluster import RayCluster, cluster_of


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two machines of two CPUs; a test that kills one adds another."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with cluster_of(tmp_path_factory.mktemp("cluster"), {"a": 2, "b": 2}) as made:
        yield made
