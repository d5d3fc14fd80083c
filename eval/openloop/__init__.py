"""Open-loop load: requests arrive at a real vLLM server when a Poisson process says so, whether it keeps up or not."""
