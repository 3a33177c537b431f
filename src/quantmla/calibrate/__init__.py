"""Learn what the fused weights will be: text, capture, methods and the run that ties them."""
