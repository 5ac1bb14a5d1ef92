from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.serving import SCRIPTED_CHECKPOINT
from tests.traces.recordings import TOKENIZER, TRACES

CONTEXT = 131072


@pytest.fixture(scope="session")
def traced_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model with Qwen3.6's tokenizer and template, answering every request with a short text."""
    for needed in (TRACES, TOKENIZER):
        if not needed.is_dir():
            pytest.skip(f"no recordings: {needed} is not there")
    folder = tmp_path_factory.mktemp("traced") / "local-model"
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / file, folder / file)
    shutil.copyfile(SCRIPTED_CHECKPOINT / "model.safetensors", folder / "model.safetensors")
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "script": "plain",
        "max_position_embeddings": CONTEXT,
        "vocab_size": 248320,
        "eos_token_id": 248046,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Greedy: drawing from 248,320 tokens would take longer than the rest of a step.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder
