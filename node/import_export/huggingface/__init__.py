"""The Hugging Face folder format, read and written."""
