"""Untrusted text as safe HTML: a Markdown parser that keeps what was written, and limits on its cost."""
