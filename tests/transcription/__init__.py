"""Plain NumPy transcriptions of the algorithms, written apart from the library and used to test it."""
