"""Parts of tools/train_tiny.py: the corpus, the two models, their training, their files, their measurement."""
