"""Other people's tools: each file needs its own extra, and is imported where it is used."""
