"""Agents in sessions in front of a small real HTTP server: what they ask, and what of it would be
trained.
"""

import aiohttp
from support.chat_server import Kit

import ttrl
from ttrl.data.tokenization import TaskResultTokenizer

EOS = 0
ASK = [{"role": "user", "content": "begin"}]


def rendered(messages):
    """A chat template over characters: a header from 1000 on, what is said, and its end."""
    ids = []
    for message in messages:
        ids += [1000 + len(message["role"]), *map(ord, message.get("content") or ""), EOS]
    return [*ids, 1009]


def server(answer=lambda body: body["messages"][-1]["content"].upper(), seen=None):
    def behaviour(body, attempt):
        if seen is not None:
            seen.append(body)
        told = answer(body)
        if isinstance(told, Kit.Reply):
            return told
        text, changes = told if isinstance(told, tuple) else (told, {})
        prompt, choice = rendered(body["messages"]), Kit.choice(0, text, **changes)
        choice["message"].update(changes.get("message") or {})
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(text) + 1,
            "total_tokens": len(prompt) + len(text) + 1,
        }
        return Kit.completion([choice], prompt_token_ids=prompt, usage=usage)

    return behaviour


def run(
    agent, grader=None, *, behaviour=None, limits=None, ignore=(), id="t", at_once=None, **kwargs
):
    task = ttrl.agent_task(
        agent, grader, messages=ASK, id=id, limits=limits, ignore=ignore, at_once=at_once
    )
    return Kit.run(behaviour or server(), [task], **kwargs)[0]


async def sampled(agent, behaviour, **options):
    """The same within a running loop."""
    async with Kit.serving(behaviour) as one, one.client() as client:
        return await ttrl.get_task_results(
            [ttrl.agent_task(agent, messages=ASK, **options)], client, "m", pbar=False
        )


async def post(session, path="/chat/completions", *, key=None, url=None, **body):
    """(status, body) of a request as any language would make it."""
    headers = {"Authorization": f"Bearer {key or session.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url or session.base_url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def said(session, *texts, **body):
    """The reply to a conversation in which user and assistant take turns."""
    messages = [
        {"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)
    ]
    status, answer = await post(session, messages=messages, **body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def trained(results):
    """All trained (id, logprob) of the first sample, sequence by sequence."""
    found = []
    for one in TaskResultTokenizer()(results[0], [0.5] * len(results[0].samples)):
        if one.sample == 0:
            marked = zip(one.token_ids, one.logprobs, one.assistant_mask, strict=True)
            found.append([(token, logprob) for token, logprob, is_trained in marked if is_trained])
    return found


def of_server(*texts):
    """What `trained` is of a sequence with these replies."""
    return [
        pair
        for text in texts
        for pair in zip([*map(ord, text), EOS], Kit.expected_logprobs(text), strict=True)
    ]
