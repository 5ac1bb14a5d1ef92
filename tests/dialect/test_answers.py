"""What the model wrote, sent back as clients send it: the prompt holds the tokens that were generated, or the client's.

The reference is always the list of ids that was "generated" here: cut in places where the tokenizer would not cut, so
that ids made from the text by the tokenizer are others.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftengine.conversation import Conversation, Event, Message, Reasoning, Text, ToolCall, ToolCallStart, ToolChoice
from ftengine.dialect import Dialect, Prompt
from ftengine.dialect import generations as memory
from ftengine.dialect.answers_file import LARGEST
from ftengine.dialect.contexts import Place
from ftengine.dialect.generations import CallWritten, Generated, Generations
from ftengine.dialect.opening import demo_template
from ftengine.dialect.prompt.turns import Call, Turn
from tests.dialect.conftest import TEMPLATES, small_dialect
from tests.dialect.families import family, new_family
from tests.dialect.talk import READ, TOOLS, WRITE, result, say, talk, think

ASK = (say("system", "You help."), say("user", "Write a."))
CALL = (
    "<tool_call>\n<function=write_file>\n<parameter=path>\na b\n</parameter>\n"
    "<parameter=content>\nx = 1\n</parameter>\n"
    "<parameter=mode>\n7\n</parameter>\n</function>\n</tool_call>"
)
ANSWER = f"I must.\nSo I do.\n</think>\n\nI write.\n\n{CALL}"
ARGUMENTS = {"path": "a b", "content": "x = 1", "mode": 7}
TEMPLATE = next((path.read_text("utf-8") for path in TEMPLATES if path.stem == "Qwen3.5-4B"), None)
needs_template = pytest.mark.skipif(TEMPLATE is None, reason="../shared is not beside the repository")


def fresh() -> Dialect:
    assert TEMPLATE is not None
    return new_family(TEMPLATE, "Qwen")


def oddly(dialect: Dialect, text: str) -> list[int]:
    """Ids of single characters, control tokens whole: no tokenizer writes this."""
    tokens: list[int] = []
    for piece in dialect._codec.control.pieces(text):  # type: ignore[attr-defined]
        whole = dialect._codec.token_id(piece) is not None  # type: ignore[attr-defined]
        tokens += dialect.encode(piece) if whole else [id for character in piece for id in dialect.encode(character)]
    return tokens


def answered(
    dialect: Dialect, conversation: Conversation, text: str, stop: str = "<|im_end|>"
) -> tuple[Prompt, list[int], list[Event]]:
    """An engine's answer, remembered. Prompt, ids and the events that the client got."""
    prompt = dialect.render(conversation)
    tokens = oddly(dialect, text)
    parser, decoder = dialect.parser(conversation, prompt), dialect.decoder()
    events = parser.feed(decoder.feed(tokens) + decoder.finish()) + parser.finish()
    tokens += dialect.encode(stop) if stop else []
    dialect.remember(conversation, prompt, tokens, events)
    return prompt, tokens, events


def call_id(events: Sequence[Event]) -> str:
    return next(event.id for event in events if isinstance(event, ToolCallStart))


def begins(tokens: Sequence[int], *parts: Sequence[int]) -> bool:
    held = [token for part in parts for token in part]
    return list(tokens[: len(held)]) == held


def sent_back(events: Sequence[Event], **changes: object) -> Message:
    """As Claude does: the object built anew, in another order, with a default."""
    values = {"id": call_id(events), "name": "write_file", "arguments": dict(reversed(ARGUMENTS.items()))}
    values["arguments"] |= {"options": {}}
    given = {**values, **changes}
    parts = [think("I must.\nSo I do."), Text("I write."), ToolCall(given["id"], given["name"], given["arguments"])]
    return Message("assistant", tuple(parts))


@needs_template
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"arguments": json.dumps(ARGUMENTS)},
        {"arguments": json.dumps({"new": None, **ARGUMENTS}, separators=(",", ":"))},
    ],
    ids=["object", "text", "compact"],
)
def test_generated_tokens_come_back(changes: dict[str, object]) -> None:
    dialect, conversation = fresh(), talk(*ASK, tools=[WRITE])
    prompt, tokens, events = answered(dialect, conversation, ANSWER)
    message = sent_back(events, **changes)
    later = dialect.render(talk(*ASK, message, result(call_id(events), "ok"), tools=[WRITE]))
    assert begins(later.tokens, prompt.tokens, tokens)
    assert later.text.startswith(prompt.text + ANSWER + "<|im_end|>\n")
    # Ids as OpenClaw sends them, reasoning left out.
    bare = call_id(events).replace("_", "")
    stripped = Message("assistant", (*message.parts[1:2], ToolCall(bare, "write_file", json.dumps(ARGUMENTS))))
    assert dialect.render(talk(*ASK, stripped, result(bare, "ok"), tools=[WRITE])).tokens == later.tokens


@needs_template
@pytest.mark.parametrize(
    "changes",
    [
        {"name": "read_file"},
        {"arguments": ARGUMENTS | {"path": "other"}},
        {"arguments": ARGUMENTS | {"mode": True}},
        {"arguments": ARGUMENTS | {"mode": "7"}},
        {"arguments": {"path": "a b", "content": "x = 1"}},
    ],
    ids=["name", "value", "type", "text", "missing"],
)
def test_other_values_under_the_same_id_stay_the_clients(changes: dict[str, object]) -> None:
    dialect, tools = fresh(), [WRITE, READ]
    prompt, tokens, events = answered(dialect, talk(*ASK, tools=tools), ANSWER)
    message = sent_back(events, **changes)
    history = talk(*ASK, message, result(call_id(events), "ok"), tools=tools)
    later = dialect.render(history)
    assert later == fresh().render(history)
    assert not begins(later.tokens, prompt.tokens, tokens)


@needs_template
@pytest.mark.parametrize("position", [0, 1])
def test_other_reasoning_or_text_stays_the_clients(position: int) -> None:
    dialect = fresh()
    _, _, events = answered(dialect, talk(*ASK, tools=[WRITE]), ANSWER)
    parts = list(sent_back(events).parts)
    parts[position] = think("Something else.") if position == 0 else Text("I wrote.")
    history = talk(*ASK, Message("assistant", tuple(parts)), result(call_id(events), "ok"), tools=[WRITE])
    assert dialect.render(history) == fresh().render(history)


@needs_template
def test_reasoning_that_was_left_out_is_only_for_whom_it_was_written() -> None:
    """By text alone an answer is found; another conversation with the same text does not get its reasoning."""
    dialect = fresh()
    prompt, tokens, _ = answered(dialect, talk(*ASK), "A secret.\n</think>\n\nDone.")
    silent = say("assistant", "Done.")
    own = dialect.render(talk(*ASK, silent))
    assert begins(own.tokens, prompt.tokens, tokens)
    foreign = talk(say("user", "Something else."), silent)
    assert dialect.render(foreign) == fresh().render(foreign)
    assert "secret" not in dialect.render(foreign).text
    told = talk(say("user", "Something else."), say("assistant", think("A secret."), "Done."))
    assert "Done." in dialect.render(told).text


def as_elsewhere(number: int, reasoning: str = "I must.\nSo I do.") -> tuple[Message, Message]:
    """What `ANSWER` says, with its result, under an id that this server never gave."""
    name = f"elsewhere{number}"
    return say("assistant", think(reasoning), "I write.", ToolCall(name, "write_file", ARGUMENTS)), result(name, "ok")


@needs_template
def test_history_from_another_server_stays_as_it_was_shown() -> None:
    """A session that is gone on with here; answers that look like its old ones come later, in it and beside it."""
    dialect, tools = fresh(), [WRITE]
    resumed = [*ASK, *as_elsewhere(1), *as_elsewhere(2)]
    prompt, tokens, events = answered(dialect, talk(*resumed, tools=tools), ANSWER)
    answered(dialect, talk(*ASK, tools=tools), ANSWER)  # another session's, with what the first one began with
    answered(dialect, talk(say("user", "Another."), tools=tools), ANSWER)
    resumed += [sent_back(events), result(call_id(events), "ok")]
    later = dialect.render(talk(*resumed, tools=tools))
    assert begins(later.tokens, prompt.tokens, tokens)
    assert dialect.render(talk(*resumed, tools=tools)) == later
    # The old turns without anything of theirs in memory: what another place's answer would have been put into.
    moved = talk(say("user", "A third."), *as_elsewhere(3), tools=tools)
    assert dialect.render(moved) == fresh().render(moved)


@needs_template
def test_turn_without_an_id_keeps_the_answer_it_was_first_shown_with() -> None:
    """The same question answered twice in the same words: each goes on from the one that was there, then from it."""
    dialect = fresh()
    first, wrote_first, _ = answered(dialect, talk(*ASK), "One thought.\n</think>\n\nDone.")
    one = talk(*ASK, say("assistant", "Done."))
    assert begins(dialect.render(one).tokens, first.tokens, wrote_first)
    answered(dialect, talk(*ASK), "Another thought.\n</think>\n\nDone.")
    assert begins(dialect.render(one).tokens, first.tokens, wrote_first)


@needs_template
@pytest.mark.parametrize(("greeting", "same"), [("Hello. I am here.", True), ("Hello.", False), ("", False)])
def test_context_is_all_that_was_said_before(greeting: str, same: bool) -> None:
    """The assistant's part too, as clients change it: white space, other ids, members added to arguments."""
    dialect = fresh()

    def history(greeting: str, call: str, **added: object) -> list[Message]:
        greeted = [say("assistant", greeting)] if greeting else []
        done = sent_back(events, id=call, arguments=ARGUMENTS | added)
        return [ASK[0], say("user", "Hi."), *greeted, ASK[1], done, result(call, "ok")]

    opened = [ASK[0], say("user", "Hi."), say("assistant", "Hello.\n I am here."), ASK[1]]
    _, _, events = answered(dialect, talk(*opened, tools=[WRITE]), ANSWER)
    begun = history("Hello.\n I am here.", call_id(events))
    _, tokens, _ = answered(dialect, talk(*begun, tools=[WRITE]), f"Well.\n</think>\n\n{CALL}")
    last = say("assistant", ToolCall("dropped", "write_file", ARGUMENTS)), result("dropped", "ok")
    later = dialect.render(talk(*history(greeting, "changed", other=1), *last, tools=[WRITE])).tokens
    assert any(later[at : at + len(tokens)] == tokens for at in range(len(later))) == same


@needs_template
def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PLACES", 5)
    dialect = fresh()
    for number in range(9):
        dialect.render(talk(say("user", f"{number}"), say("assistant", "So."), say("user", "And?")))
    assert len(dialect._generations._shown) == 5  # type: ignore[attr-defined]


@needs_template
def test_a_new_question_leaves_of_an_answer_what_the_template_keeps() -> None:
    dialect = fresh()
    _, tokens, events = answered(dialect, talk(*ASK, tools=[WRITE]), ANSWER)
    history = talk(*ASK, sent_back(events), result(call_id(events), "ok"), say("user", "Why?"), tools=[WRITE])
    later = dialect.render(history)
    assert "I must." not in later.text
    assert f"<|im_start|>assistant\nI write.\n\n{CALL}<|im_end|>\n" in later.text
    call = tokens[tokens.index(dialect.encode("<tool_call>")[0]) :]
    assert any(later.tokens[at : at + len(call)] == call for at in range(len(later.tokens)))


@needs_template
@pytest.mark.parametrize(
    "text",
    [
        f"Draft:\n{CALL}\nNo, another.\n</think>\n\nI write.\n\n{CALL}",
        f"x\n</think>\n\nI write.\n\n\n\n{CALL}\n\n",
        "x\n</think>\n\nI write.\n\n" + CALL.replace("mode>\n7", "mode>\n 7.0"),
        'x\n</think>\n\nI write.\n\n<tool_call>{"name":"write_file","arguments":'
        + json.dumps(ARGUMENTS)
        + "}</tool_call>",
    ],
    ids=["draft", "space", "number", "json"],
)
def test_however_the_model_wrote_it(text: str) -> None:
    """Drafts of calls in the reasoning, odd spaces, numbers in another form, JSON where the template teaches XML."""
    dialect = fresh()
    prompt, tokens, events = answered(dialect, talk(*ASK, tools=[WRITE]), text)
    reasoning = "".join(event.text for event in events if type(event).__name__ == "ReasoningDelta")
    parts = (Reasoning(reasoning), Text("I write."), ToolCall(call_id(events), "write_file", ARGUMENTS))
    later = dialect.render(talk(*ASK, Message("assistant", parts), result(call_id(events), "ok"), tools=[WRITE]))
    assert begins(later.tokens, prompt.tokens, tokens)


@needs_template
def test_answers_that_were_cut() -> None:
    """By max_tokens or by the client: text and whole calls go on; a call that is not whole is the template's."""
    dialect = fresh()
    prompt, tokens, _ = answered(dialect, talk(*ASK), "x\n</think>\n\nOnce upon a ti", stop="")
    later = dialect.render(talk(*ASK, say("assistant", think("x"), "Once upon a ti")))
    assert begins(later.tokens, prompt.tokens, tokens, dialect.encode("<|im_end|>"))
    for text in ("still thinking", ANSWER[:-30]):
        dialect = fresh()
        _, _, events = answered(dialect, talk(*ASK, tools=[WRITE]), text, stop="")
        calls = [ToolCall(event.id, event.name, ARGUMENTS) for event in events if isinstance(event, ToolCallStart)]
        history = talk(*ASK, say("assistant", think("still thinking"), "I write.", *calls), tools=[WRITE])
        assert dialect.render(history) == fresh().render(history)


@needs_template
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "write_file")])
def test_calls_that_the_prompt_began(choice: ToolChoice) -> None:
    dialect = fresh()
    begun = dialect.render(talk(*ASK, tools=[WRITE], tool_choice=choice)).prefilled
    prompt, tokens, events = answered(
        dialect, talk(*ASK, tools=[WRITE], tool_choice=choice), CALL.removeprefix(begun).removeprefix("\n")
    )
    back = say("assistant", ToolCall(call_id(events), "write_file", ARGUMENTS))
    later = dialect.render(talk(*ASK, back, result(call_id(events), "ok"), tools=[WRITE]))
    assert begins(later.tokens, prompt.tokens, tokens)


def test_template_that_divides_turns_otherwise_is_left_alone() -> None:
    """Two messages for one turn and none for another one: as many as turns, but not the same."""
    source = (
        "{% for m in messages %}{% if m.content == 'It is so.' %}<|im_start|>assistant\nPlan<|im_end|>\n{% endif %}"
        "{% if m.content != 'skip' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "<|im_start|>assistant\n"
    )
    dialect = new_family(source)
    first, second = say("assistant", "It is so."), say("assistant", "skip")
    answered(dialect, talk(*ASK), "It is so.")
    answered(dialect, talk(*ASK, first, say("user", "And?")), "skip")
    history = talk(*ASK, first, say("user", "And?"), second, say("user", "So?"))
    assert dialect.render(history) == new_family(source).render(history)


def test_every_template_goes_on_from_plain_answers(shared_template: str, request: pytest.FixtureRequest) -> None:
    """In the last round, before anyone asks again."""
    name = str(request.node.callspec.id)
    dialect = family(shared_template, name)
    conversation = talk(*ASK)
    end = {"GLM": "<|user|>", "Mini": "[e~[", "deep": "<｜end▁of▁sentence｜>", "goog": "<turn|>", "open": "<|return|>"}
    stop = next((token for begin, token in end.items() if name.startswith(begin)), "<|im_end|>")
    prompt = dialect.render(conversation)
    begun = "Hm.\n</think>\n\n" if prompt.in_reasoning else "\n<think></think>\n" if name.startswith("GLM") else ""
    prompt, tokens, _ = answered(dialect, conversation, f"{begun}It is so.", stop=stop)
    parts = [think("Hm.")] if begun.startswith("Hm.") else []
    later = dialect.render(talk(*ASK, say("assistant", *parts, "It is so."), say("user", "Really?")))
    if name.startswith(("google", "openai", "Qwen3.5", "Qwen-Qwen3", "MiniMax", "GLM-4.7")):
        # They show an earlier answer in another way than they began it: reasoning left out, or another channel.
        assert "It is so." in later.text
    else:
        assert begins(later.tokens, prompt.tokens, tokens), name


def test_calls_in_the_hermes_form() -> None:
    dialect = small_dialect(demo_template())
    conversation = talk(*ASK, tools=TOOLS)
    text = 'Well.\n<tool_call>\n{"arguments": {"path": "a",  "content": "b"}, "name": "write_file"}\n</tool_call>'
    prompt, tokens, events = answered(dialect, conversation, text)
    back = say("assistant", "Well.", ToolCall(call_id(events), "write_file", '{"path":"a","content":"b"}'))
    later = dialect.render(talk(*ASK, back, result(call_id(events), "ok"), tools=TOOLS))
    assert begins(later.tokens, prompt.tokens, tokens)


def made(number: int, size: int = 100) -> Generated:
    call = CallWritten(f"id{number}", "read_file", {"path": "p" * size})
    return Generated(b"\0\0\0\0", "t", (), -1, "", "", ("",), (call,), bytes(16))


def turn(number: int, size: int = 100) -> Turn:
    return Turn("assistant", calls=[Call(f"id_{number}", "read_file", {"path": "p" * size})])


def nowhere() -> Place:
    return Place(b"", b"")


def test_memory_is_bounded_and_forgets_the_least_recently_seen() -> None:
    kept = Generations(room=20 * made(10).size)
    for number in range(10, 30):
        kept.add(made(number))
    assert kept.find(turn(10), nowhere) is not None
    for number in range(30, 40):
        kept.add(made(number))
        assert kept.size <= 20 * made(10).size
    numbers = [answer.calls[0].id for answer in kept]
    assert numbers == [
        *(f"id{number}" for number in range(21, 30)),
        "id10",
        *(f"id{number}" for number in range(30, 40)),
    ]
    kept.add(made(99, size=1 << 20))
    assert len(kept) == 20
    assert len(kept._found_by) == 20 + 1  # ids, and the one look that all of them have


def test_several_threads() -> None:
    kept = Generations(room=50 * made(0).size)
    failures: list[Exception] = []

    def work(begin: int) -> None:
        try:
            for number in range(begin, begin + 300):
                kept.add(made(number, size=number))
                found = kept.find(turn(number, size=number), nowhere)
                assert found is None or found.calls[0].id == f"id{number}"  # another thread may need the room
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(begin,)) for begin in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert kept.size == sum(answer.size for answer in kept)


def remembered(dialect: Dialect) -> int:
    return len(dialect._generations)  # type: ignore[attr-defined]


@needs_template
def test_file_brings_answers_over_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, file = fresh(), tmp_path / "private" / "answers"
    prompt, tokens, events = answered(before, talk(*ASK, tools=[WRITE]), ANSWER)
    before.save_answers(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["answers"]
    after = fresh()
    after.load_answers(file)
    later = after.render(talk(*ASK, sent_back(events), result(call_id(events), "ok"), tools=[WRITE]))
    assert begins(later.tokens, prompt.tokens, tokens)
    after.load_answers(tmp_path / "nothing")
    assert caplog.records == []


@needs_template
def test_file_of_another_model_or_damaged_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "answers"
    dialect = fresh()
    answered(dialect, talk(*ASK, tools=[WRITE]), ANSWER)
    dialect.save_answers(file)
    raw = file.read_bytes()
    other = small_dialect(demo_template())
    known = remembered(other)
    other.load_answers(file)
    assert remembered(other) == known
    assert "another model's" in caplog.text
    cold = fresh()
    for at in range(0, 8 * len(raw), max(1, 8 * len(raw) // 200)):
        flipped = bytearray(raw)
        flipped[at // 8] ^= 1 << at % 8
        file.write_bytes(flipped)
        cold.load_answers(file)
    for length in (0, 5, 70, len(raw) - 1):
        file.write_bytes(raw[:length])
        cold.load_answers(file)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(raw)
    cold.load_answers(file)
    with open(tmp_path / "large", "wb") as large:
        large.truncate(LARGEST + 1)
    cold.load_answers(tmp_path / "large")
    cold.load_answers(tmp_path)
    assert remembered(cold) == 0


@needs_template
def test_file_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dialect = fresh()
    (tmp_path / "file").write_text("x")
    dialect.save_answers(tmp_path / "file" / "answers")
    assert len(caplog.records) == 1
    assert "could not be written" in caplog.text
