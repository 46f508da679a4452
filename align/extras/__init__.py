"""Features beyond the InstructGPT recipe: rule and attribute models, distillation, labeling rounds, planning.

Extras import the core; the core never imports them.
"""
