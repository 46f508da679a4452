"""What alignment costs: tasks of lm-eval before and after."""
