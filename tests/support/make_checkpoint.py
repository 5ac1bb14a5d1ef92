"""Makes the generated files of tests/support/scripted_checkpoint: a tokenizer and a file of weights.

    python -m tests.support.make_checkpoint

The tokenizer is trained on this repository's own text. It depends on the text of the day and on nothing else, and the
file that is checked in need not be made again: a byte-level vocabulary spells every text. The special tokens and their
meaning are those of the Qwen family. The weights are one number, since a checkpoint without any is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = Path(__file__).with_name("scripted_checkpoint")
VOCABULARY = 8192  # config.json's vocab_size, added tokens included
SOURCES = ("README.md", "docs/*.md", "engine/**/*.py", "ftlaunch/**/*.py", "providers/**/*.py", "tests/**/*.py")

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def corpus() -> list[str]:
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return [path.read_text(encoding="utf-8") for path in paths]


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP),
        special_tokens=list(CONTROL),  # ids 0, 1, 2, as the configuration files say
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # What tools and reasoning are written with is text: a decoder that drops special tokens must keep it.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def main() -> None:
    tokenizer = train(corpus())
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the text is too short for {VOCABULARY} tokens: {tokenizer.get_vocab_size()}")
    form = json.loads(tokenizer.to_str())
    text = json.dumps(form, ensure_ascii=False, separators=(",", ":"))
    (CHECKPOINT / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    weights = CHECKPOINT / "model.safetensors"
    save_file({"unused": numpy.zeros(1, numpy.float32)}, weights)
    weights.chmod(0o644)  # the library makes it private


if __name__ == "__main__":
    main()
