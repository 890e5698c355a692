"""What every package of the library may use."""
