from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="there is no Triton for this system")
