"""Models of installed packages in the decoder's place (docs/plugged-models.md)."""
