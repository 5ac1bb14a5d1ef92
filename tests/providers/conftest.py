from __future__ import annotations

import pytest

from ftproviders import Endpoint


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(
        url="http://127.0.0.1:1919",
        model="demo",
        context_window=65_536,
        max_output_tokens=8_192,
        api_key="key-of-server",
    )
