"""Rows of other projects' layouts as records: a file for each family, one function per layout, which names its source."""
