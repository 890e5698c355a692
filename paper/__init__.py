"""The SRBA paper, decided: its experiments run at full protocol, kept, drawn, and every claim beside its evidence."""
