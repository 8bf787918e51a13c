"""Code that several backends share. Nothing here chooses a backend or knows one."""
