"""Where the time of an engine step goes: step times of measured runs, and their parts from separate, instrumented ones."""
