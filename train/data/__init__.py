"""Prompts, the answers of the target, and token files with exact answer masks."""
