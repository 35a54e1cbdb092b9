"""Fixtures of sampling."""

import pytest
from support.chat_server import Kit


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrl.rollouts.scheduling import servers
    from ttrl.rollouts.scheduling.server_state import Pauses

    monkeypatch.setattr(servers, "PAUSES", Pauses(first_retry=0.01))
