"""The alignment tax: lm-eval's tasks before and after alignment."""
