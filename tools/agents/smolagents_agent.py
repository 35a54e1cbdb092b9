"""A ToolCallingAgent of smolagents (`pip install smolagents[openai]`) as its documentation has it;
it knows nothing of ttrl.
"""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def count_letters(text: str) -> str:
    """Count the letters of a text.

    Args:
        text: what to look at
    """
    return f"{sum(letter.isalpha() for letter in text)} letters"


if __name__ == "__main__":
    with open(os.environ["TTRL_AGENT_TASK"]) as file:
        messages = json.load(file)["messages"]
    model = OpenAIModel(
        model_id=os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    print(
        ToolCallingAgent(tools=[count_letters], model=model, max_steps=3).run(
            messages[0]["content"]
        )
    )
