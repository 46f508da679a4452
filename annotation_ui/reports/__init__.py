"""Computations on stored judgments: agreement, reliability, tables for the lead, exports."""
