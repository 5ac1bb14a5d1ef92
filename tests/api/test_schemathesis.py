"""Every endpoint against its own description, with data made to fit it and data made not to (faults.md row 14)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from ftengine.api.description import document
from tests.api.fronts import MODEL, FrontProcess, front
from tests.api.talk import simple
from tests.api.test_fuzz import check_time

KEY = {"x-api-key": "s3cret"}
CONFIG = {
    # A made-up Authorization beside the right x-api-key would look like a server that ignores keys.
    "generation": {"with-security-parameters": False, "database": "none"},
    "checks": {
        # The structs leave content blocks, the tools of Responses and limits across fields to the translations: data
        # that fits the description may still be refused, in a form that the other checks look at.
        "positive_data_acceptance": {"enabled": False},
    },
    # Without POST: where only GET is, the guard asks for a JSON body before anyone looks at the method.
    "phases": {"coverage": {"unexpected-methods": ["GET", "PUT", "DELETE", "PATCH", "TRACE"]}},
}
BODIES = ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions", "/v1/completions", "/v1/responses")
MORE = 2_000  # bodies for each of them in the long run

schema = schemathesis.openapi.from_dict(json.loads(document(keyed=True)), config=schemathesis.Config.from_dict(CONFIG))


@pytest.fixture(scope="module")
def keyed_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """Asserts at the end that nothing in it stumbled and nothing still runs."""
    with front(tmp_path_factory.mktemp("keyed") / "model", api_key=KEY["x-api-key"]) as running:
        yield running
        with running.client(headers=KEY) as client:
            assert client.get("/health").json()["restarts"] == 0
            assert client.get("/v1/stats").json()["running"] == 0
        assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        opened.trust_env = False
        yield opened


def ask(case: schemathesis.Case, front: FrontProcess, session: requests.Session) -> schemathesis.Response:
    """Runs the checks: no 5xx; status, headers and body as described; what does not fit is refused; the key is needed;
    405 with Allow for other methods."""
    make_answerable(case)
    return case.call_and_validate(base_url=front.url, session=session, headers=KEY)


def make_answerable(case: schemathesis.Case) -> None:
    """Without a question and the served model's name, all that fits the description would end at the same two 4xx."""
    if case.meta.generation.mode.is_negative or not isinstance(case.body, dict):
        return
    if case.body.get("model") is not None:
        case.body["model"] = MODEL
    for field, value in simple(case.operation.path, "hi").items():
        case.body[field] = case.body.get(field) or value


@schema.parametrize()
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_as_described(case: schemathesis.Case, keyed_front: FrontProcess, session: requests.Session) -> None:
    ask(case, keyed_front, session)


def many(path: str, count: int, front: FrontProcess, session: requests.Session) -> list[tuple[int, float]]:
    """Status and seconds of the answers to `count` bodies, half of which do not fit."""
    answers: list[tuple[int, float]] = []
    operation = schema[path]["POST"]
    cases = st.one_of(operation.as_strategy(GenerationMode.POSITIVE), operation.as_strategy(GenerationMode.NEGATIVE))

    @settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(cases)
    def one(case: schemathesis.Case) -> None:
        response = ask(case, front, session)
        answers.append((response.status_code, response.elapsed))

    one()
    return answers


@pytest.mark.slow
@pytest.mark.timeout(3600)  # nearly all of it goes into making the bodies
def test_ten_thousand_bodies_and_no_memory_trend(keyed_front: FrontProcess, session: requests.Session) -> None:
    process = psutil.Process(keyed_front.process.pid)
    for path in BODIES:
        many(path, MORE // 10, keyed_front, session)
    before = process.memory_info().rss
    answers = [answer for path in BODIES for answer in many(path, MORE, keyed_front, session)]
    growth = process.memory_info().rss - before
    refusals = sorted(seconds for status, seconds in answers if status != 200)
    assert len(answers) >= 10_000
    assert 1_000 < len(refusals) < 9_000, "both kinds of bodies"
    check_time(refusals)
    assert growth < 8 << 20
