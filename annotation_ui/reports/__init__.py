"""What is computed from stored judgments: agreement, reliability, tables for the lead, exports."""
