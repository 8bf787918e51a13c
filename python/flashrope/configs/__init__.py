"""What model configurations say of their rotary embedding, as plain data. Knows no ``Rotary``."""
