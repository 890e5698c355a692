"""NumPy transcriptions of the algorithms, written independently of the library and used to test it."""
