"""Rendering of untrusted text as safe HTML, with a Markdown parser that keeps all characters and limits on its cost."""
