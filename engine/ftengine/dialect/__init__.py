"""What a model family speaks: see base.py for the contract."""

from ftengine.dialect.base import Dialect, OutputParser, Prompt, TokenDecoder
from ftengine.dialect.opening import open_dialect

__all__ = ["Dialect", "OutputParser", "Prompt", "TokenDecoder", "open_dialect"]
