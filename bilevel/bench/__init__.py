"""The benchmark: whole grids in one program, kept in a store, shown as a page."""
