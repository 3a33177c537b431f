"""Why equal cache error gives unequal output error: sensitivity of both cached paths, by layer."""
