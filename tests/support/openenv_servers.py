"""OpenEnv servers for tests: a game in which a number is guessed (one session at a time), and one
with tools.
"""

import random
import time
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=0, le=7, description="a number from 0 to 7")


class Told(Observation):
    text: str


class HigherOrLower(Environment):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Told:
        self.secret = random.Random(seed).randrange(kwargs.get("numbers", 8))
        return Told(text="You have not guessed yet.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Told:  # type: ignore[override]
        if action.number == 7:
            raise RuntimeError("the dice fell off the table")
        if action.number == 6:
            time.sleep(600)
        if action.number == self.secret:
            return Told(text="Right.", reward=1.0, done=True)
        return Told(text="Higher." if action.number < self.secret else "Lower.", reward=-0.25)

    @property
    def state(self) -> State:
        return State()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="higher_or_lower", description="Guess the number.")


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: FastMCP = FastMCP("shop")
        self.basket: list[str] = []

        @server.tool
        def put(item: str) -> str:
            """Put something into the basket."""
            if item == "moon":
                raise ValueError("it is too large")
            self.basket.append(item)
            return f"{len(self.basket)} in the basket"

        @server.tool
        def pay() -> str:
            """Pay; this is the end."""
            return "thank you"

        super().__init__(server)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Observation:
        self.wanted = ["milk", "eggs"][(seed or 0) % 2]
        return Told(text=f"Buy {self.wanted}.")

    async def step_async(
        self, action: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Observation:
        found = await (
            self._async_handle_call_tool(action)
            if isinstance(action, CallToolAction)
            else self._async_handle_list_tools()
        )
        if getattr(action, "tool_name", "") == "pay":
            found.done, found.reward = True, float(self.basket == [self.wanted])
        return found

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **kwargs: Any
    ) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


game = create_fastapi_app(HigherOrLower, Guess, Told)
shop = create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=8)
