"""What goes beyond the InstructGPT recipe: rule and attribute models, distillation, rounds of labeling, planning.

Extras import the core; the core never imports them.
"""
