"""Random draft models, an engine with its reference beside it, and independent sources to judge the reference by."""
