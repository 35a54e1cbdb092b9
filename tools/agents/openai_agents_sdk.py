"""An agent of the OpenAI Agents SDK (`pip install openai-agents`) as its documentation has it; it
knows nothing of ttrl.
"""

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # traces would be sent to OpenAI


@function_tool
def count_letters(text: str) -> str:
    """Count the letters of a text."""
    return f"{sum(letter.isalpha() for letter in text)} letters"


if __name__ == "__main__":
    with open(os.environ["TTRL_AGENT_TASK"]) as file:
        messages = json.load(file)["messages"]
    agent = Agent(
        name="Writer",
        instructions="Write letters.",
        model=os.environ["OPENAI_MODEL"],
        tools=[count_letters],
    )
    print(Runner.run_sync(agent, messages[0]["content"], max_turns=20).final_output)
