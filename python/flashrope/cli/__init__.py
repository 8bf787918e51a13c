"""The command ``flashrope``. It finds a command in ``lab``, and loads torch only when the command runs."""
