"""What an agent needs to run against one server, as plain data.

A provider turns an endpoint and the user's options into an `AgentPlan`. It reads the environment that it is given and,
where it says so, the user's settings; it writes nothing and starts nothing: ftlaunch does, or only prints the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

ANSWER_ROOM = 512  # tokens that must be left beside the first prompt for an agent to be of any use


@dataclass(frozen=True)
class Endpoint:
    """One model behind one server."""

    url: str  # base URL without `/v1` or a trailing slash
    model: str  # its id in the APIs
    context_window: int  # tokens, prompt and answer together
    max_output_tokens: int
    api_key: str  # never empty; servers without a key ignore it

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for."""

    user_args: tuple[str, ...] = ()
    lean: bool = False  # the agent's small form, where it has one
    isolated: bool = False  # ignore the user's own configuration of the agent
    interactive: bool = True  # a person sits at the terminal
    strip_all: bool = False  # also remove credentials that the user's work may need
    directory: Path = Path()  # where the agent works


@dataclass(frozen=True)
class AgentPlan:
    """Everything that a launch does: the child's environment is (environ - env_remove) + env_set."""

    argv: tuple[str, ...]
    env_set: Mapping[str, str]
    env_remove: tuple[str, ...]  # names present in the environment
    files: Mapping[Path, str] = field(default_factory=dict)  # written at each launch, 0600, under ft's own folder
    seeds: Mapping[Path, str] = field(default_factory=dict)  # written only where missing: the agent's to change
    exclusive: Path | None = None  # lock file of a folder that one process at a time can use
    notes: tuple[str, ...] = ()  # sentences for the user

    def child_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in environ.items() if name not in self.env_remove}
        return {**kept, **self.env_set}


@dataclass(frozen=True)
class Npm:
    """An agent's package. `tested` is what we ran; what `supported` matches is expected to take the same settings."""

    package: str
    tested: str
    supported: tuple[int, ...]  # leading parts of the versions that are known good

    @property
    def spec(self) -> str:
        return f"{self.package}@{self.tested}"

    def supports(self, version: str) -> bool:
        parts = version.split("-")[0].split(".")
        return [int(part) if part.isdigit() else -1 for part in parts[: len(self.supported)]] == list(self.supported)


@dataclass(frozen=True)
class FirstPrompt:
    """Tokens of an agent's first request: tools, system text and a short question (measured, Qwen3.6 tokenizer)."""

    headless: int
    interactive: int


class Provider(ABC):
    name: ClassVar[str]  # what a person types
    title: ClassVar[str]
    npm: ClassVar[Npm]
    executable: ClassVar[str]
    first_prompt: ClassVar[FirstPrompt]
    lean_prompt: ClassVar[FirstPrompt | None] = None  # None: has no lean form
    needs_own_node: ClassVar[bool] = False  # cares which Node.js runs it; see `runs_on_node`

    @abstractmethod
    def headless(self, user_args: Sequence[str]) -> bool:
        """Whether these arguments make the agent answer once and end."""

    @abstractmethod
    def plan(
        self,
        command: Sequence[str],
        endpoint: Endpoint,
        options: LaunchOptions,
        folder: Path,
        environ: Mapping[str, str],
    ) -> AgentPlan:
        """`command` starts the agent, `folder` is ft's own for this agent, `environ` is the user's environment."""

    def runs_on_node(self, version: tuple[int, int]) -> bool:
        """Whether this Node.js (major, minor) will do."""
        return True

    def prompt_tokens(self, options: LaunchOptions) -> int:
        """Tokens of the first request in the form that the options choose."""
        size = self.lean_prompt if options.lean and self.lean_prompt else self.first_prompt
        headless = not options.interactive or self.headless(options.user_args)
        return size.headless if headless else size.interactive

    def output_tokens(self, endpoint: Endpoint, options: LaunchOptions) -> int:
        """The answer limit to tell the agent: at most half of what its first prompt leaves of the window."""
        left = endpoint.context_window - self.prompt_tokens(options)
        return max(min(endpoint.max_output_tokens, left // 2), ANSWER_ROOM // 2)
