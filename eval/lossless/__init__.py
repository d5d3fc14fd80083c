"""Does speculative decoding change what comes out? The ladder L0 to L4, from the sampler alone to lengths of answers."""
