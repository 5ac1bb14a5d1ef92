"""Which session a request belongs to, and whether it runs beside that session's main conversation.

Both are hints for the prompt cache: they order what it gives up and never decide what matches.

**Session.** The client's own key, hashed; the key itself is neither kept nor logged. In this order:

    Claude Code         X-Claude-Code-Session-Id, or `session_id` in the JSON of metadata.user_id
    Codex, OpenAI       prompt_cache_key, or the headers thread-id, session-id, session_id
    OpenCode            x-session-id, x-session-affinity
    OpenAI              user; it names a person, so each conversation of that person is a session

Without any of them the session is "", and the cache goes by the longest prefix.

**Side requests** (titles, compactions, sub-agents), by the first rule that applies:

    1. The client says so: Claude Code's x-claude-code-agent-id, x-claude-code-request-class or, in its attribution
       block, cc_is_subagent=true; Codex' turn metadata, x-openai-subagent or x-codex-parent-thread-id; OpenCode's
       x-parent-session-id. The last user text is an agent's order to compact the conversation.
    2. No tools, while the session's main conversation has some. A coding agent's first request without tools and
       without history counts, too: its title comes before the session's main conversation.
    3. Of a coding agent: another system prompt and another opening than the main conversation has (a sub-agent that
       shares its session's key). A conversation that brings history when it is first seen is older than what is known,
       so it is the main one: as after a restart of the server in the middle of a sub-agent's work.

All else is main. A request that is wrongly main only stays cached for longer; so doubt decides for main.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ftengine.api.body import loads
from ftengine.conversation import Conversation, Message, Text

SESSIONS = 256  # that are known at once; of more, the ones asked for longest ago are forgotten
SIDES = 16  # sub-agents' system prompts known of a session
KEY_CHARACTERS = 4096  # of a key that count
ATTRIBUTION = "x-anthropic-billing-header:"  # begins a block of Claude Code's system prompt that is none

_AGENT_HEADERS = ("x-session-id", "x-session-affinity")
_CODEX_HEADERS = ("thread-id", "session-id", "session_id")
_CODEX_SIDE = frozenset({"compaction", "memory", "review"})  # request_kind
_CODEX_SIDE_THREADS = frozenset({"subagent", "thread_title", "memory_consolidation", "system"})  # thread_source
_CLAUDE_SIDE = frozenset({"subagent", "workflow", "compaction", "auxiliary"})  # x-claude-code-request-class
_CLAUDE_USER = re.compile(r"_session_([0-9a-fA-F-]{36})$")  # the older form of metadata.user_id
_COMPACTION = ("CRITICAL: Respond with TEXT ONLY", "You are performing a CONTEXT CHECKPOINT COMPACTION")


@dataclass(frozen=True)
class Caller:
    """What a request tells of its sender."""

    key: str = ""  # hashed
    agent: bool = False  # the key is of a kind that only coding agents send
    personal: bool = False  # the key names a person
    says: Literal["", "main", "side"] = ""


NOBODY = Caller()


def claude_caller(headers: Mapping[str, str], metadata: Any, system: Any) -> Caller:
    """Of a Messages request; metadata and system as they came, of any type."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    key = _key(headers.get("x-claude-code-session-id")) or _key(_claude_session(user))
    says = _claude_says(headers, system)
    return Caller(key, agent=True, says=says) if key else _header_caller(headers, says) or Caller(says=says)


def openai_caller(headers: Mapping[str, str], prompt_cache_key: Any = None, user: Any = None) -> Caller:
    """Of a request to one of OpenAI's APIs; the fields as they came, of any type."""
    says = _openai_says(headers)
    codex = next((key for name in _CODEX_HEADERS if (key := _key(headers.get(name)))), "")
    if key := _key(prompt_cache_key) or codex:
        return Caller(key, agent=bool(codex), says=says)
    if found := _header_caller(headers, says):
        return found
    return Caller(_key(user), personal=True, says=says) if _key(user) else Caller(says=says)


def _header_caller(headers: Mapping[str, str], says: Literal["", "main", "side"]) -> Caller | None:
    key = next((key for name in _AGENT_HEADERS if (key := _key(headers.get(name)))), "")
    return Caller(key, agent=True, says=says) if key else None


def _key(value: Any) -> str:
    """Hashed; "" for what is no key."""
    text = value.strip()[:KEY_CHARACTERS] if isinstance(value, str) else ""
    return _hash(text).hex() if text else ""


def _hash(*texts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode("utf-8", "replace"))
        digest.update(b"\0")
    return digest.digest()


def _claude_session(user: Any) -> Any:
    if not isinstance(user, str) or len(user) > KEY_CHARACTERS:
        return None
    if found := _CLAUDE_USER.search(user):
        return found[1]
    value = loads(user)
    return value.get("session_id") if isinstance(value, dict) else None


def _claude_says(headers: Mapping[str, str], system: Any) -> Literal["", "main", "side"]:
    kind = headers.get("x-claude-code-request-class", "").strip().lower()
    if kind in _CLAUDE_SIDE or headers.get("x-claude-code-agent-id", "").strip():
        return "side"
    if any(text.startswith(ATTRIBUTION) and "cc_is_subagent=true" in text for text in _blocks(system)):
        return "side"
    return "main" if kind == "main" else ""


def _blocks(system: Any) -> Iterator[str]:
    """The beginnings of a system prompt's first blocks, among which the attribution is."""
    for block in system[:8] if isinstance(system, list) else (system,):
        text = block.get("text") if isinstance(block, dict) else block
        if isinstance(text, str):
            yield text[:1024]


def _openai_says(headers: Mapping[str, str]) -> Literal["", "main", "side"]:
    if any(headers.get(name, "").strip() for name in ("x-parent-session-id", "x-codex-parent-thread-id")):
        return "side"
    if headers.get("x-openai-subagent", "").strip():
        return "side"
    turn = loads(headers.get("x-codex-turn-metadata", ""))
    if not isinstance(turn, dict):
        return ""
    kind, thread = turn.get("request_kind"), turn.get("thread_source")
    if (isinstance(kind, str) and kind in _CODEX_SIDE) or (isinstance(thread, str) and thread in _CODEX_SIDE_THREADS):
        return "side"
    return "main" if (kind, thread) == ("turn", "user") else ""


@dataclass(frozen=True)
class Shape:
    """What tells one conversation from another. Hashes over texts; made where rendering runs, for texts may be long."""

    system: bytes  # of what stands before the first other message
    opening: bytes  # of the first user message; b"" without one
    tools: bool
    answered: bool  # it has an assistant's turn
    compaction: bool

    @staticmethod
    def of(conversation: Conversation) -> Shape:
        messages = conversation.messages
        begin = next((i for i, one in enumerate(messages) if one.role not in ("system", "developer")), len(messages))
        opening = next((one for one in messages if one.role == "user"), None)
        last = messages[-1] if messages and messages[-1].role == "user" else None
        return Shape(
            system=_hash(*(text for one in messages[:begin] for text in _texts(one))),
            opening=_hash(*_texts(opening)) if opening else b"",
            tools=bool(conversation.tools),
            answered=any(one.role == "assistant" for one in messages),
            compaction=any(text.startswith(_COMPACTION) for text in (_texts(last) if last else ())),
        )


def _texts(message: Message) -> Iterator[str]:
    return (part.text for part in message.parts if isinstance(part, Text))


@dataclass
class _Session:
    main: Shape | None = None
    sides: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # system prompts, oldest first


class Sessions:
    """The conversations of the sessions asked for last. One thread's only."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Session] = OrderedDict()

    def place(self, caller: Caller, shape: Shape | None) -> tuple[str, bool]:
        """The request's session and whether it is a side request. shape: None where there is no conversation."""
        if shape is None:
            return ("" if caller.personal else caller.key), caller.says == "side"
        key = caller.key
        if caller.personal:
            key = _hash(key, shape.system.hex(), shape.opening.hex()).hex()
        if caller.says == "side" or shape.compaction:
            return key, True
        return key, bool(key) and self._beside(self._session(key), caller, shape)

    def _session(self, key: str) -> _Session:
        session = self._known.setdefault(key, _Session())
        self._known.move_to_end(key)
        if len(self._known) > SESSIONS:
            self._known.popitem(last=False)
        return session

    @staticmethod
    def _beside(session: _Session, caller: Caller, shape: Shape) -> bool:
        """Rules 2 and 3. What is not beside the main conversation is the main one, as it is from now on."""
        main = session.main
        if caller.says != "main" and main is None and caller.agent and not (shape.tools or shape.answered):
            return True
        if caller.says != "main" and main is not None:
            if main.tools and not shape.tools:
                return True
            other = shape.system != main.system and (shape.opening != main.opening or not shape.opening)
            if caller.agent and other and (shape.system in session.sides or not shape.answered):
                session.sides[shape.system] = None
                session.sides.move_to_end(shape.system)
                if len(session.sides) > SIDES:
                    session.sides.popitem(last=False)
                return True
        session.main = shape
        return False
