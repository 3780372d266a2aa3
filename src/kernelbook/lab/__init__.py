"""The laboratory: what measures, searches, draws and records. The library imports nothing of it; it needs the extra ``lab``."""
