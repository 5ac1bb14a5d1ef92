"""From any model that is read to an FTW directory (docs/ftw.md). Planning it needs no torch."""
