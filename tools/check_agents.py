"""Are agents that nobody here wrote trained on exactly what the server sampled? Programs of
packages, trained unchanged.

    python tools/check_agents.py [--venvs .venv-agents] [--only langgraph] [--iterations 2]
        [--samples 8] [--keep DIR]

Each program of tools/agents runs as a command, in an environment of its own below --venvs, as the
packages may pin what ttrl cannot have:

    for name in openai-agents langgraph smolagents; do python -m venv .venv-agents/$name; done
    .venv-agents/openai-agents/bin/pip install openai-agents
    .venv-agents/langgraph/bin/pip install langgraph langchain-openai
    .venv-agents/smolagents/bin/pip install 'smolagents[openai]'

The model is a tiny random one on a real vLLM server, whose parser takes every second answer for a
call of the first tool; it is rewarded for the letters that it writes. Printed for each: replies and
failed samples of the run; trained tokens; whether each reply and each packed label is, with its
log-probability, one that the server returned, as it stood in its answers' bytes; and the mean
reward of the first and the last iteration. Exit status 1 where something differs or a program
failed.
"""

import argparse
import json
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ttrl
from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.errors import TtrlError
from ttrl.records import Sample
from ttrl.rollouts.client.http_transport import HTTPTransport
from ttrl.system.files import read_jsonl
from ttrl.tasks.task import RolloutLimits
from ttrl.tiny_model import make_tiny_model

AGENTS = {
    "openai": ("openai_client.py", ()),
    "openai-agents": ("openai_agents_sdk.py", ()),
    "langgraph": ("langgraph_agent.py", ()),
    # It asks for "required", which is another distribution.
    "smolagents": ("smolagents_agent.py", ("tool_choice",)),
}
"""By the name of the environment: the program, and what of its requests is ignored."""
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}{{- call.function.arguments.text -}}{%- endfor -%}{{- "
    "'<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
PARSER = """
import json
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

@ToolParserManager.register_module("every_second")
class EverySecond(ToolParser):
    def extract_tool_calls(self, model_output, request):
        if not request.tools or sum(map(ord, model_output)) % 2:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        call = FunctionCall(name=request.tools[0].function.name, arguments=json.dumps({"text": model_output}))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[ToolCall(function=call)], content=None)
"""  # noqa: E501
ENDING = (94, 190)
"""Tokens of the tiny model, of bytes that are no ASCII, that end a reply."""
CONTEXT = 16384
"""The tiny model has a token for each byte, and some packages have long prompts."""
Reply = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Ids of the prompt and of the reply, and the log-probabilities of these."""


def write_calling_model(folder: Path, **options: Any) -> dict[str, Any]:
    """Write a tiny model that calls tools to folder/model; return the arguments of its server."""
    model = make_tiny_model(folder / "model", **options)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = model / name
        if path.suffix == ".jinja":
            path.write_text(TEMPLATE)
        elif "chat_template" in (settings := json.loads(path.read_text())):
            path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    plugin = folder / "every_second.py"
    plugin.write_text(PARSER)
    return {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "every_second",
        "tool_parser_plugin": str(plugin),
    }


@dataclass
class Recorded:
    """What the server returned, read from its answers' bytes."""

    replies: Counter[Reply] = field(default_factory=Counter)

    def read(self, data: bytes) -> None:
        whole = json.loads(data)
        for choice in whole["choices"]:
            prompt = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
            logprobs = choice["logprobs"]
            values = logprobs.get("token_logprobs") or [
                entry["logprob"] for entry in logprobs["content"]
            ]
            self.replies[tuple(prompt), tuple(choice["token_ids"]), tuple(values)] += 1


@contextmanager
def recording() -> Iterator[Recorded]:
    """Read along what servers answer to this process."""
    recorded = Recorded()
    post = HTTPTransport.post

    async def read_along(self: HTTPTransport, path: str, body: Any, **options: Any) -> bytes:
        data = await post(self, path, body, **options)
        if path.endswith("completions"):
            recorded.read(data)
        return data

    HTTPTransport.post = read_along  # type: ignore[method-assign]
    try:
        yield recorded
    finally:
        HTTPTransport.post = post  # type: ignore[method-assign]


def replies_of(sample: Sample) -> list[Reply]:
    """Return the replies of a sample with their whole prompts."""
    prompts: list[list[int]] = []
    replies: list[Reply] = []
    at = 0
    for turn in sample.turns or ():
        assert (
            turn.prompt_token_ids is not None
            and sample.token_ids is not None
            and sample.logprobs is not None
        )
        before = (
            []
            if turn.continues is None
            else [*prompts[turn.continues], *replies[turn.continues][1]]
        )
        prompts.append([*before, *turn.prompt_token_ids])
        ids, logprobs = (
            list(values)[at : at + turn.num_tokens]
            for values in (sample.token_ids, sample.logprobs)
        )
        replies.append((tuple(prompts[-1]), tuple(ids), tuple(logprobs)))
        at += turn.num_tokens
    return replies


@dataclass
class Found:
    """What came of a run."""

    samples: int = 0
    failed: int = 0
    replies: int = 0
    trained: int = 0
    rewards: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compare(run: Path, recorded: Recorded | None = None) -> Found:
    """Hold what was stored and packed against what the server returned, and against each other."""
    found = Found()
    left = Counter({} if recorded is None else recorded.replies)
    for folder in sorted(run.glob("iterations/[0-9]*")):
        if not (folder / "rollouts.jsonl").exists():
            continue
        samples = [Sample.from_json(row) for row in read_jsonl(folder / "rollouts.jsonl")]
        graded = [sample for sample in samples if sample.reward is not None]
        found.samples, found.failed = (
            found.samples + len(samples),
            found.failed + len(samples) - len(graded),
        )
        found.problems += [
            f"{sample.where}: {sample.error}" for sample in samples if sample.error is not None
        ][:3]
        found.rewards.append(sum(sample.reward or 0 for sample in graded) / max(1, len(graded)))
        rewards: dict[str, set[float]] = {}
        for sample in graded:
            rewards.setdefault(sample.task_id, set()).add(sample.reward or 0.0)
        to_train: Counter[tuple[int, float]] = Counter()
        for sample in samples:
            replies = replies_of(sample)
            found.replies += len(replies)
            for reply in replies:
                left[reply] -= 1
                if recorded is not None and left[reply] < 0:
                    found.problems.append(
                        f"{sample.where}: a reply that the server did not return, or kept twice"
                    )
                # Other groups have no signal.
                if sample.reward is not None and len(rewards[sample.task_id]) > 1:
                    to_train.update(zip(reply[1], np.float32(reply[2]).tolist(), strict=True))
        packed = PackedTensors.load(folder / "packed.safetensors")
        is_label = packed.labels != IGNORE_LABEL
        pairs = zip(
            packed.labels[is_label].tolist(), packed.logprobs[is_label].tolist(), strict=True
        )
        found.trained += packed.num_trained
        if (trained := Counter(pairs)) != to_train:
            found.problems.append(
                f"{folder.name}: {(trained - to_train).total()} labels are not the server's, "
                f"{(to_train - trained).total()} of its tokens are not trained"
            )
    return found


def letters(choice: Any) -> float:
    """Return the share of letters in what the model wrote, all branches together."""
    texts = [
        message.get("content") or "" for turn in choice.turns for message in turn["messages"][-1:]
    ]
    texts += [
        call["function"]["arguments"]
        for turn in choice.turns
        for call in turn["messages"][-1].get("tool_calls") or ()
    ]
    written = "".join(texts)
    return sum(letter in string.ascii_letters for letter in written) / max(1, len(written))


def check(
    folder: Path,
    agent: Any,
    ignore: Any,
    *,
    iterations: int,
    tasks: int = 4,
    samples: int = 8,
    **settings: Any,
) -> Found:
    """Train an agent, and compare."""
    arguments = write_calling_model(folder, layers=2, width=64, heads=2, context=CONTEXT)
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "model": str(folder / "model"),
        "iterations": iterations,
        "tasks_per_iteration": tasks,
        "samples_per_task": samples,
        "max_tokens": 32,
        # Or a random model would be cut off each time, which the OpenAI Agents SDK takes for a
        # failure.
        "sampling": {"stop_token_ids": list(range(*ENDING))},
        "seq_len": CONTEXT,
        "num_threads": 1,
        "training": {"lr": 3e-3, "rows_per_microbatch": 1},
        "server": {"max_num_seqs": 64, **arguments},
    }
    limits = RolloutLimits(turns=8, seconds=120)
    made = [
        ttrl.agent_task(
            agent,
            letters,
            messages=f"Write letters, number {n}.",
            id=f"letters/{n}",
            limits=limits,
            ignore=ignore,
        )
        for n in range(tasks)
    ]
    with recording() as recorded:
        ttrl.train(ttrl.TrainConfig(**config | settings), made)
    return compare(folder / "run", recorded)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venvs", type=Path, default=Path(".venv-agents"))
    parser.add_argument("--only", choices=AGENTS, action="append")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args()
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="ttrl-agents-"))).absolute()
    problems = []
    lines = [
        f"{'agent':16}{'samples':>8}{'failed':>8}{'replies':>9}{'trained':>9}  {'equal':6}  "
        "mean "
        "reward"
    ]
    for name in options.only or AGENTS:
        program, ignore = AGENTS[name]
        python = options.venvs.absolute() / name / "bin" / "python"
        command = [
            str(python if python.exists() else sys.executable),
            str(Path(__file__).with_name("agents") / program),
        ]
        try:
            found = check(
                folder / name,
                command,
                ignore,
                iterations=options.iterations,
                samples=options.samples,
            )
        except TtrlError as error:
            found = Found(problems=[str(error)])
        rewards = " ".join(f"{reward:.3f}" for reward in found.rewards)
        counts = f"{found.samples:8}{found.failed:8}{found.replies:9}{found.trained:9}"
        lines.append(f"{name:16}{counts}  {'no' if found.problems else 'yes':6}  {rewards}")
        problems += [f"{name}: {problem}" for problem in found.problems]
    print("\n".join([*lines, *problems]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
