"""A model by the address of its server."""

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl.errors import UserError
from ttrl.server.serving import serving


def test_requests_to_an_address_name_the_account_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    for variable in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(variable, raising=False)
    with threaded(ChatHandler) as address:
        with serving(address) as served:
            assert served.endpoint.headers == {} and served.endpoint.api_key == "secret-key"
        monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
        monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-2")
        with serving(address) as served:
            assert served.endpoint.headers == {
                "OpenAI-Organization": "org-1",
                "OpenAI-Project": "proj-2",
            }
            assert served.model == "m" and "secret" not in repr(served)


def test_a_server_that_runs_takes_no_chat_template() -> None:
    given = {"chat_template": "{{ messages }}"}
    with (
        pytest.raises(UserError, match="already runs, with a chat template of its own"),
        serving("https://api.example.com/v1", **given),
    ):
        pass
