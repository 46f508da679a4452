"""Studies that docs/studies/ reports: one command each, which goes on where it was broken off."""
