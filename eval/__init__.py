"""Serve a head in vLLM, measure it against plain decoding, judge and report."""
