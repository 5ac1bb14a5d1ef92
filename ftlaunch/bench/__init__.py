"""Measuring a served model end to end, over HTTP as its clients speak it. Needs no PyTorch."""
