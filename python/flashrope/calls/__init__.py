"""What a call is and what a backend must do: records of calls, tables and layers of a cache, plans, and the checks of
arguments."""
