"""The OpenAPI description against the routes, the documentation and what the server sends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from starlette.routing import Route

from ftengine.api.app import build_app
from ftengine.api.description import document
from ftengine.api.engine_client import EngineClient
from ftengine.api.front import Front
from tests.api.fronts import settings

DOCS = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def described(*, keyed: bool) -> dict[str, Any]:
    return json.loads(document(keyed=keyed))


def operations() -> dict[tuple[str, str], dict[str, Any]]:
    paths = described(keyed=True)["paths"]
    return {(method.upper(), path): found for path, methods in paths.items() for method, found in methods.items()}


def test_every_route_is_described_and_every_description_has_a_route(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    routes = build_app(Front(wanted, EngineClient(wanted.engine, ()))).routes
    assert all(isinstance(route, Route) for route in routes)
    served = {(method, route.path_format) for route in routes for method in route.methods if method != "HEAD"}
    assert served == set(operations())


def test_documentation_lists_the_same_endpoints_and_statuses() -> None:
    text = DOCS.read_text(encoding="utf-8")
    table = text.partition("| endpoint |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(?:GET |POST )?(/[^` ]*)`", table)) == {path for _, path in operations()}
    documented = set(re.findall(r"^\| (\d{3}) \|", text, re.MULTILINE)) | {"200", "529"}
    assert documented == {status for found in operations().values() for status in found["responses"]} | {"405"}


@pytest.mark.parametrize("keyed", [False, True])
def test_is_valid_openapi(keyed: bool) -> None:
    schemathesis.openapi.from_dict(described(keyed=keyed)).validate()


def test_served_to_anyone_who_may_ask(client: httpx.Client) -> None:
    response = client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.content == document(keyed=False)


def test_key_is_described_where_it_is_needed() -> None:
    opened = {path for (_, path), found in operations().items() if not found["security"]}
    assert opened == {"/", "/health", "/api/hello", "/openapi.json"}
    assert all(("401" in found["responses"]) == bool(found["security"]) for found in operations().values())
    assert "securitySchemes" not in described(keyed=False)["components"]
    assert "401" not in described(keyed=False)["paths"]["/v1/stats"]["get"]["responses"]


@pytest.mark.parametrize(("method", "path"), [*operations()])
def test_another_method_is_refused_with_those_allowed(client: httpx.Client, method: str, path: str) -> None:
    """405 carries Allow (RFC 9110, 15.5.6)."""
    other = "GET" if method == "POST" else "POST"
    response = client.request(other, path.replace("{id}", "x"), headers={"content-type": "application/json"})
    assert response.status_code == 405
    assert method in response.headers["allow"].split(", ")
    assert other not in response.headers["allow"].split(", ")
