"""`ttrl chat`: a conversation with a model at an address."""

import io
import json
import logging
from typing import Any, ClassVar

import openai
import pytest
from support.chat_server import ChatHandler, threaded

from ttrl.cli.commands import Lines, main, make_parser
from ttrl.cli.models import client_of, run_chat
from ttrl.errors import ServerError
from ttrl.records import Endpoint


class Echo(ChatHandler):
    """Streams how many messages it was sent, and the last one."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def reply(self, request):
        messages = request["messages"]
        if messages[-1]["content"] == "too long":
            return "no room", "error"
        self.asked.append(request)
        parts = [f"{len(messages)} ", messages[-1]["content"].upper(), None]
        chunks = [
            {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            for _ in parts
        ]
        for chunk, part in zip(chunks, parts, strict=True):
            chunk["choices"] = [{"index": 0, "delta": {"content": part}, "finish_reason": None}]
        chunks.append(chunks[0] | {"choices": []})  # usage comes without a choice
        return "".join(
            f"data: {json.dumps(one)}\n\n" for one in chunks
        ) + "data: [DONE]\n\n", "stream"


@pytest.fixture
def address():
    Echo.asked.clear()
    with threaded(Echo) as address:
        yield address


def chat(address, text, *more):
    """Hold a conversation of these lines."""
    lines = iter(text.splitlines())
    return run_chat(make_parser().parse_args(["chat", address, *more]), lambda: next(lines, None))


def test_a_conversation(address, capsys):
    assert chat(address, "one\ntwo\n\nthree\n", "--system", "be short", "--max-tokens", "7") == 0
    assert capsys.readouterr().out == "2 ONE\n4 TWO\n2 THREE\n"  # the empty line began anew
    second = Echo.asked[1]["messages"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert (
        second[2]["content"] == "2 ONE"
        and Echo.asked[1]["max_tokens"] == 7
        and Echo.asked[1]["temperature"] == 0
    )


def test_a_server_that_refuses(address):
    with pytest.raises(ServerError, match=r"m did not answer: .*no room"):
        chat(address, "too long\n")


def test_a_reply_does_not_act_on_the_terminal(address, capsys):
    """Escapes can write files in some terminals, and hide what was said in all."""
    assert chat(address, "\x1b]0;title\x07\x1b[2J\u202e\n") == 0
    assert capsys.readouterr().out == "1 \\x1b]0;TITLE\\x07\\x1b[2J\\u202e\n"


@pytest.mark.parametrize("uses_proxy", [False, True])
def test_a_proxy_is_not_given_the_key_of_our_own_server(address, monkeypatch, uses_proxy):
    """The server stands in for the proxy; nobody listens where the client believes it asks."""
    monkeypatch.setenv("HTTP_PROXY", address.removesuffix("/v1"))
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    endpoint = Endpoint("http://127.0.0.1:9/v1", "secret", {}, uses_proxy=uses_proxy)
    with client_of(endpoint) as client:
        if uses_proxy:
            assert [model.id for model in client.models.list().data] == ["m"]
        else:
            with pytest.raises(openai.APIConnectionError):
                client.with_options(max_retries=0).models.list()


@pytest.mark.parametrize(
    "command",
    ["chat /not/there", "serve /not/there --key-file KEY", "tasks try t.py --model /not/there"],
)
def test_nothing_is_said_to_start_for_a_model_that_is_not_there(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(
        "from ttrl import Task\ntasks = [Task([{'role': 'user', 'content': 'a'}], lambda c: 1.0)]\n"
    )
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("ttrl: error: model folder /not/there does not exist")
        and "tarting" not in said
    )


def test_without_a_command_there_is_the_list_of_them(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "talk to a model, such as a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (logging.INFO, "preparing the tasks"),
        (logging.WARNING, "WARNING ttrl.plans: preparing the tasks"),
    ],
)
def test_what_goes_on_is_a_plain_line_and_what_is_wrong_says_where(level, said):
    record = logging.LogRecord(
        "ttrl.plans", level, __file__, 1, "preparing the %s", ("tasks",), None
    )
    assert Lines("%(levelname)s %(name)s: %(message)s").format(record) == said
    record.args = ("tasks\x1b[2J",)
    assert "\x1b" not in Lines("%(levelname)s %(name)s: %(message)s").format(record)


def test_the_lines_of_a_conversation_may_come_from_a_file(address, capsys, monkeypatch):
    """Without a terminal there is no prompt, and the conversation ends with its input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n two \n"))
    assert main(["chat", address]) == 0
    assert capsys.readouterr().out == "1 ONE\n3 TWO\n"


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_cannot_be_is_refused(port, capsys):
    assert main(["ui", "--port", port]) == 2
    assert f"--port is {port}; it must be from 1 to 65535, or 0" in capsys.readouterr().err
