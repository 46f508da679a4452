"""Untrusted text as safe HTML: a Markdown parser that keeps all characters, and limits on its cost."""
