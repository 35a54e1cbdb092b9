"""A ReAct agent of LangGraph (`pip install langgraph langchain-openai`) as its documentation has
it; it knows nothing of ttrl.
"""

import json
import os

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def count_letters(text: str) -> str:
    """Count the letters of a text."""
    return f"{sum(letter.isalpha() for letter in text)} letters"


if __name__ == "__main__":
    with open(os.environ["TTRL_AGENT_TASK"]) as file:
        messages = json.load(file)["messages"]
    agent = create_react_agent(
        ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [count_letters], prompt="Write letters."
    )
    print(agent.invoke({"messages": messages})["messages"][-1].content)
