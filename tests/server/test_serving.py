"""A model by the address of its server."""

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl.errors import ServerError, UserError
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


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://[::1/v1", "the address of the server is not valid: Invalid IPv6 URL"),
        ("http:///v1", "the address names no server; give one such as http://127.0.0.1"),
        ("http://user:secret@127.0.0.1/v1", "key"),
    ],
)
def test_an_address_that_cannot_be_asked_is_refused(address: str, said: str) -> None:
    with pytest.raises(UserError) as caught, serving(address):
        pass
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


class _Silent(ChatHandler):
    models = ()


class _Unlisted(ChatHandler):
    def do_GET(self) -> None:  # noqa: N802 - the name of http.server
        self.send_error(404)


def test_a_server_without_models_needs_their_name() -> None:
    """Some providers list none, and the name is theirs to check."""
    with (
        threaded(_Silent) as address,
        pytest.raises(ServerError, match="serves no model"),
        serving(address),
    ):
        pass
    with threaded(_Unlisted) as address:
        with serving(address, name="mine") as served:
            assert served.model == "mine"
        with pytest.raises(ServerError, match="404"), serving(address):
            pass
