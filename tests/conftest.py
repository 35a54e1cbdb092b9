"""Settings for all tests."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Machines are noisy: a slow example is no failure. What guards a change tries the same examples each time; people explore.
settings.register_profile("ttrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("ttrl"), derandomize=True)
settings.load_profile("same" if os.environ.get("TTRL_TESTS_SAME_EXAMPLES") else "ttrl")

# A shell starts what is put into the background with Ctrl-C ignored, and every process below inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What the imports made stays for ever: `gc.collect()` in a test need not look through all of torch, half a second long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of httpx reads the certificates of all authorities when it is made (50 ms); tests speak to themselves."""
    import certifi

    with open(certifi.where(), encoding="utf-8") as file:
        first, end, _ = file.read().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield
