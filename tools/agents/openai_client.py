"""A loop over tools with OpenAI's client (`pip install openai`); it knows nothing of ttrl."""

import json
import os

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "count_letters",
        "description": "Count the letters of a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}

if __name__ == "__main__":
    with open(os.environ["TTRL_AGENT_TASK"]) as file:
        messages = json.load(file)["messages"]
    client = OpenAI()
    while True:
        completion = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL]
        )
        message = completion.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            letters = sum(
                letter.isalpha() for letter in json.loads(call.function.arguments)["text"]
            )
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"{letters} letters"}
            )
    print(message.content)
