"""FTW, the layout that the engine runs from (docs/ftw.md): its header, reading, writing and checking.

Only `source` needs torch.
"""
